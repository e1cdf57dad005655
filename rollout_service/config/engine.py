"""Settings of one engine: quantization of its weights, its KV cache, and the engine itself."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from rollout_service.protocol.base import refuse_bool, takes_numbers
from rollout_service.protocol.tensors import QuantWeights

_GRAPH_KEYS = {"cudagraph_capture_sizes", "cudagraph_mode", "cudagraph_num_of_warmups", "max_cudagraph_capture_size"}
"""Keys of vLLM's ``compilation_config`` that change no result."""
_EMULATE_CASTS = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"
"""Variable of ``engine.env`` that changes where an engine rounds."""
_KERNELS_OF_MODE: dict[str, Literal["cuda_eager", "cuda_compiled"]] = {
    "0": "cuda_eager", "none": "cuda_eager", "3": "cuda_compiled", "vllm_compile": "cuda_compiled",
}  # fmt: skip
"""vLLM's ``compilation_config.mode`` → kernels."""


class Config(BaseModel):
    """Base class of sections: immutable; unknown fields, infinity, NaN, and booleans for numbers refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: object, field: ValidationInfo) -> object:
        return refuse_bool(value) if takes_numbers(cls.model_fields[field.field_name or ""].annotation) else value


class QuantConfig(Config):
    """Quantization of a trainer's weights by the ingest."""

    weights: QuantWeights = "fp8_block"
    """Format of linear layers. ``fp8_block``: E4M3 codes in 128×128 blocks with fp32 scales. ``fp8_channel``,
    ``int8_channel``: E4M3 or INT8 codes with an fp32 scale for each output channel. ``none``: BF16, without
    quantization."""

    skip: tuple[str, ...] = ()
    """Further modules to leave in BF16, as ``fnmatch`` patterns over Hugging Face module names: ``*.layers.0.*``.
    Modules that vLLM fuses must be skipped together: ``*.qkv_proj`` or ``*.[qkv]_proj``, and ``*.mlp.experts`` for a
    layer's experts."""

    scales: Literal["fp32", "power_of_two"] = "fp32"
    """Scales of 128×128 blocks. ``fp32``: a block's largest weight becomes exactly the largest code. ``power_of_two``:
    scales are rounded up to a power of two (UE8M0), which Blackwell's kernels and DeepGEMM need and which costs some
    precision."""

    indivisible: Literal["error", "keep_bf16"] = "error"
    """Treatment of a layer whose shard on a GPU is not a whole number of 128×128 blocks. ``error``: refuse to start.
    ``keep_bf16``: leave the layer in BF16, with all layers fused with it. ``rollout-service inspect`` shows these
    layers."""

    @model_validator(mode="after")
    def _options_need_quantization(self) -> "QuantConfig":
        defaults = QuantConfig.model_fields
        idle = [name for name, value in self if name != "weights" and value != defaults[name].default]
        if self.weights == "none" and idle:
            raise ValueError(
                f"quant.{', quant.'.join(idle)}: set, but quant.weights is none and everything stays in BF16: "
                "leave it out"
            )
        of_blocks = [name for name in idle if name in ("scales", "indivisible")]
        if self.weights not in ("fp8_block", "none") and of_blocks:
            raise ValueError(
                f"quant.{', quant.'.join(of_blocks)}: set, but quant.weights is {self.weights}, which has no blocks: "
                "leave it out"
            )
        return self


class KVCacheConfig(Config):
    """The format of the KV cache. ``engine.gpu_memory_utilization`` bounds its size; on a CPU,
    ``engine.cpu_kv_cache_gib`` does."""

    dtype: Literal["auto", "fp8_e4m3", "bfloat16"] = "auto"
    """Format of keys and values (docs/kv_scales.md). ``auto``: FP8, or BF16 if FP8 is not accurate enough for the
    model's keys or values. The first replica measures that, and restarts its engine if necessary. ``fp8_e4m3``: such a
    model is refused at start, with the names of its layers."""

    scales_policy: Literal["reuse", "unit"] = "reuse"
    """Scales of a weight version that comes without any. ``reuse``: those of the previous version; 1 before the first
    scales. ``unit``: 1."""


class AdaptersConfig(Config):
    """LoRA adapters (docs/adapters.md)."""

    max_live: int = Field(default=0, ge=0, le=256)
    """Maximum number of adapter versions in an engine, over all names. An update needs a free one, since rollouts
    finish under the version that they began with. 0: none; the engine then has no LoRA layers, which cost speed and
    memory even when unused."""

    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 32
    """The largest rank. Engines reserve memory for ``max_live`` adapters of this rank in all linear layers."""


class EngineConfig(Config):
    """One vLLM engine, and limits of a replica."""

    max_model_len: int = Field(default=2048, gt=1)
    """Maximum length of prompt and completion together, in tokens."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs of one replica; the shards live inside the replica (vLLM's ``mp`` executor)."""

    expert_parallel: bool = False
    """Give each GPU of a replica whole experts of a mixture, instead of a slice of every expert. Attention
    and all other layers are still sharded by ``tensor_parallel_size``. Use it for experts whose slices would not be
    whole FP8 blocks. vLLM's ``enable_expert_parallel``."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of sequences that vLLM decodes at once."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one step, including prompts. None: vLLM's own default, which for an engine inside
    another program is 2048. Larger values read the weights fewer times for the same prompts."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory for weights, staging buffer and KV cache together. The KV cache gets the rest. Not used
    on the CPU."""

    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    """Size of a CPU engine's KV cache, in GiB; not used on a GPU."""

    enforce_eager: bool = False
    """Disable torch.compile and CUDA graphs. Always on for the CPU."""

    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1, strict=True)], ...] | None = Field(default=None, min_length=1)
    """Batch sizes in tokens for which CUDA graphs are captured. A step is padded to the next larger size. None: 28
    sizes up to 512. Fewer sizes start faster and pad more. Not on the CPU."""

    linear_backend: str = "auto"
    """Kernels of linear layers: vLLM's ``kernel_config.linear_backend``. ``auto``: DeepGEMM for FP8 blocks on Hopper,
    where CUDA's nvcc 12.9 or newer compiles its kernels at the first start; else ``cutlass`` (docs/performance.md)."""

    attention_backend: Literal["auto", "group", "FLASH_ATTN", "TRITON_ATTN"] = "auto"
    """Attention kernels on a GPU. ``FLASH_ATTN``, ``TRITON_ATTN``: vLLM's, which read live KV scales; its other
    backends freeze them. ``group``: FlashAttention 3 whose decode reads a prompt shared by several sequences once for
    all of them (docs/group_attention.md). ``auto``: ``group`` for models that were measured with it, else
    ``FLASH_ATTN``."""

    lm_head: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which the output head computes logits. ``float32``: logits are not rounded, as in trainers with fp32
    logits (MiniMax-M1's report, arXiv 2506.13585); the head's weights are BF16 in any case. vLLM's ``head_dtype``."""

    block_size: int | None = Field(default=None, ge=16)
    """Number of tokens in a page of the KV cache; None: vLLM's own choice."""

    kv_offload_gib: float | None = Field(default=None, gt=0)
    """GiB of host memory for KV cache blocks. vLLM offloads blocks to it that may not stay on a replica's GPUs, which
    share it; it counts as /dev/shm. None: no offloading. It needs ``weights.kv_cache_on_update: keep``
    (docs/kv_cache.md). Not on the CPU."""

    staging: Literal["auto", "device", "host", "none"] = "auto"
    """Memory in which a replica stages the next version while it still serves. ``device``: GPU memory beside the
    weights, as much as each GPU's weights, out of ``gpu_memory_utilization``; updates pause the engine for
    milliseconds. ``host``: as much pinned memory; the pause lasts as long as the PCIe copy, 0.2 s for 10 GB. ``none``:
    the version is checked, and read from the files again during the pause. ``auto``: ``device`` if that takes at most
    40% of the KV cache, else ``host``, or ``none`` without enough host memory. The engine's log shows the choice and
    its cost. On the CPU, memory is allocated for each version and released."""

    enable_sleep_mode: bool = False
    """Let ``POST /sleep`` release the engines' memory for a trainer on the same GPUs (docs/colocated.md).
    ``POST /wake_up`` restores it and loads the newest version. vLLM's own allocator then holds weights and KV cache."""

    return_sampling_mask: bool = False
    """Return the token ids that ``top_k``, ``top_p`` and ``min_p`` kept for each token of a completion
    (docs/correction.md). A trainer can renormalize over them. It applies to every request: ``top_k`` must be at
    least 1 and the temperature above 0, and other requests are refused. Not on the CPU."""

    return_routed_experts: bool = False
    """Let requests ask for the experts of each token, with ``return_routed_experts`` (docs/correction.md). A trainer
    can route each token to the same experts. Engines then record them for all tokens, including cached prompts. Host
    memory in bytes: the KV cache's tokens times layers and experts per token. Only for mixtures of experts; not on the
    CPU."""

    deterministic: bool = False
    """Use vLLM's batch-invariant kernels: a sequence's logprobs do not depend on the rest of its batch, nor on the run.
    Samples repeat for requests with a ``seed`` or temperature 0. Slower. Not on the CPU, nor for experts in FP8."""

    adapters: AdaptersConfig = AdaptersConfig()

    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of vLLM, by the names of its AsyncEngineArgs: docs/vllm_settings.md. Arguments that the service
    sets itself are refused, with the setting to use instead. ``hf_overrides`` may only set values that change no
    tensor, above all RoPE scaling."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes: ``{"NCCL_SOCKET_IFNAME": "eth0"}``. Variables that the
    service sets are refused. Ray logs them, so they must not contain secrets."""

    max_logprobs: int = Field(default=20, ge=-1)
    """Maximum number of top logprobs that a request may ask for at each token; -1: the whole vocabulary. Distillation
    asks for 64 to 256 (docs/rollouts.md)."""

    seed: int = 0
    """Seed of the engine; requests may have their own."""

    version_wait_s: float = Field(default=30.0, ge=0)
    """Maximum time in seconds that a request waits for the weight version that it asks for, then 425 or 409."""

    max_attempts: int = Field(default=3, ge=1)
    """Maximum number of generations of a completion, if replicas abort it or die; refusals do not count."""

    replica_wait_s: float = Field(default=600.0, ge=0)
    """Maximum time in seconds that the rest of an interrupted completion waits for a replica. Then its tokens are
    returned with ``finish_reason="abort"``. A rollout without tokens waits without a limit."""

    admission_limit: int | None = Field(default=None, ge=1)
    """Maximum number of sequences that a replica holds, running or waiting in vLLM; a request counts ``n``.
    Further requests wait in the gateways. None: four times ``max_num_seqs``, since a request occupies its places until
    its longest completion has ended."""

    @property
    def sequences_per_replica(self) -> int:
        """Return the admission limit of a replica."""
        return self.admission_limit or 4 * self.max_num_seqs

    @property
    def gpu_kernels(self) -> Literal["cuda_eager", "cuda_compiled"] | None:
        """Return the kernels between the matrix products of an engine on a GPU, see ``TrainerRecipe``. None: they are
        not known, because ``deterministic``, ``extra`` or ``env`` changes them."""
        compilation = self.extra.get("compilation_config", {})
        if not isinstance(compilation, dict) or self.deterministic or _EMULATE_CASTS in self.env:
            return None
        if self.enforce_eager:
            return "cuda_eager"
        default = 0 if self.extra.get("optimization_level") == 0 else 3
        mode = str(compilation.get("mode", default)).lower()
        if compilation.keys() - _GRAPH_KEYS - {"mode"}:
            return None
        return _KERNELS_OF_MODE.get(mode)

    @property
    def why_penalties_start_anew(self) -> str | None:
        """Return the reason why engines cannot count the tokens of an interrupted completion's first part; None: they
        can."""
        if self.return_sampling_mask:
            return "vLLM takes no logits processor beside sampling masks (engine.return_sampling_mask)"
        if self.extra.get("speculative_config") is not None:
            return "vLLM takes no logits processor beside speculation (engine.extra.speculative_config)"
        return None

    @model_validator(mode="before")
    @classmethod
    def _is_on_one_host(cls, data: object) -> object:
        asked = [name for name in ("pipeline_parallel_size", "distributed") if isinstance(data, dict) and name in data]
        if asked:
            raise ValueError(
                f"engine.{' and engine.'.join(asked)}: an engine is on one host here, and has neither pipeline stages "
                "nor ranks on other nodes yet: set engine.tensor_parallel_size up to the GPUs of a host, with "
                "engine.expert_parallel for a mixture of experts; docs/hardware.md says what larger ones would take"
            )
        return data

    @model_validator(mode="after")
    def _settings_fit(self) -> "EngineConfig":
        step = self.max_num_batched_tokens
        if step is not None and step < self.max_num_seqs:
            raise ValueError(
                f"engine.max_num_batched_tokens={step} is below engine.max_num_seqs={self.max_num_seqs}, and each "
                "sequence takes one token of a step: raise the first, or lower the second"
            )
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "engine.expert_parallel shares out experts over the GPUs of a replica, and engine.tensor_parallel_size "
                "is 1: raise it, or leave expert_parallel out"
            )
        others = [name for name in ("enable_sleep_mode", "return_routed_experts") if getattr(self, name)]
        if self.kv_offload_gib is not None and others:
            raise ValueError(
                f"engine.kv_offload_gib={self.kv_offload_gib:g} is not tested with engine.{others[0]}: leave one out"
            )
        if self.enforce_eager and self.cuda_graph_sizes is not None:
            sizes = list(self.cuda_graph_sizes)
            raise ValueError(f"engine.cuda_graph_sizes={sizes}, but engine.enforce_eager captures none: leave one out")
        return self
