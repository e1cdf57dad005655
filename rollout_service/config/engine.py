"""What one engine is made of: how weights become what it loads, its KV cache, and the engine itself."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from rollout_service.protocol.tensors import QuantWeights


class Config(BaseModel):
    """Base: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class QuantConfig(Config):
    """How the ingest turns a trainer's weights into what the engines load."""

    weights: QuantWeights = "fp8_block"
    """``fp8_block``: E4M3 codes in 128×128 blocks with fp32 scales. ``fp8_channel``, ``int8_channel``: E4M3 or INT8
    codes with an fp32 scale for each output channel. ``none``: BF16, as the trainer sent them."""

    skip: tuple[str, ...] = ()
    """More modules to leave in BF16, as ``fnmatch`` patterns over Hugging Face module names, e.g. ``*.layers.0.*``.
    What vLLM fuses goes together: ``*.qkv_proj`` or ``*.[qkv]_proj``, and ``*.mlp.experts`` for a layer's experts."""

    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    """So many layers at the beginning of the model stay in BF16, whole. NeMo-RL's name for it."""

    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    """Likewise at its end."""

    scales: Literal["fp32", "power_of_two"] = "fp32"
    """``fp32``: a block's largest weight becomes exactly the largest code. ``power_of_two``: scales rounded up to a
    power of two (UE8M0), which Blackwell's kernels and DeepGEMM want and which costs some precision."""

    indivisible: Literal["error", "keep_bf16"] = "error"
    """What to do with a layer of which a GPU's shard is not a whole number of 128×128 blocks: refuse to start, or
    leave it in BF16 with all that it is fused with. ``rollout-service inspect`` shows which layers those are."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ingest quantizes; ``auto``: on a GPU if it sees one. Codes and scales are the same bits everywhere."""

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


class KVCalibrationConfig(Config):
    """How a replica measures q, k and v of a version before it serves it."""

    prompts: Path | None = None
    """JSON lines, a list of token ids each, that are measured every time. None: recent rollouts of the replica, prompts
    with completions; before there are any, random tokens."""

    max_sequences: int = Field(default=16, ge=1)
    """Sequences that are measured at once."""

    max_sequence_tokens: int = Field(default=256, ge=2, le=2048)
    """Tokens of each, from its first on; no more than ``engine.max_model_len`` or ``max_num_batched_tokens`` either."""

    percentile: float = Field(default=99.9, gt=0, le=100)
    """Over the largest values of the forward passes; of up to 501, 99.9 takes the largest."""

    margin: float = Field(default=1.05, gt=0, allow_inf_nan=False)
    """Factor on the largest value, for what the batch did not show."""

    power_of_two: bool = True
    """Scales are rounded up to powers of two, which costs FP8 no precision and keeps them steady between versions."""

    progressive: bool = False
    """Scales are made from the largest values since the log began, so that they only grow and one batch cannot shrink
    them; without it from those of the version's own batch."""


class KVCacheConfig(Config):
    """The KV cache, and the scales of an FP8 one: docs/kv_scales.md."""

    dtype: Literal["auto", "fp8_e4m3", "bfloat16"] = "auto"
    """``auto``: FP8, and BF16 if FP8 is not accurate enough for the model's keys or values, which the first replica
    measures, and then starts its engine again. ``fp8_e4m3``: such a model is refused at start, with the names of its
    layers. ``rollout-service inspect MODEL --fp8-kv`` measures it before."""

    scales_policy: Literal["calibrate", "reuse", "unit"] = "reuse"
    """What a weight version gets that comes without scales. ``calibrate``: the first replica that loads it measures
    them, and all load the same. ``reuse``: those of the version before; 1 as long as none has come. ``unit``: 1."""

    calibration: KVCalibrationConfig = KVCalibrationConfig()
    """How the service measures scales, and whether FP8 is accurate enough for a model."""

    @model_validator(mode="after")
    def _scales_need_fp8(self) -> "KVCacheConfig":
        if self.dtype == "bfloat16" and self.scales_policy == "calibrate":
            raise ValueError(
                "kv_cache.scales_policy is calibrate, but kv_cache.dtype is bfloat16, and a BF16 cache has no scales: "
                "leave one out"
            )
        return self


class EngineConfig(Config):
    """One vLLM engine, and when a replica says no."""

    max_model_len: int = Field(default=2048, gt=1)
    """Longest prompt + completion, in tokens."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one replica; the shards live inside the replica (vLLM's ``mp`` executor)."""

    expert_parallel: bool = False
    """Each GPU of a replica has some of a mixture's experts, whole, and not a slice of every one; attention and all
    else are cut by ``tensor_parallel_size`` as before. For experts whose slices would be no whole FP8 blocks. vLLM's
    ``enable_expert_parallel``."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that vLLM decodes at once."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one step, those of prompts included. None: vLLM's own choice, which for an engine inside another
    program is 2048; more reads the weights fewer times for the same prompts."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache; not used on the CPU."""

    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache of a CPU engine, in GiB; not used on a GPU."""

    enforce_eager: bool = False
    """No torch.compile and no CUDA graphs. Always on for the CPU."""

    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    """Batch sizes in tokens that become CUDA graphs; a step is padded to the next larger one. None: 28 sizes up to 512.
    Fewer sizes start sooner and pad more. Not on the CPU."""

    linear_backend: str = "auto"
    """vLLM's ``kernel_config.linear_backend``. On Hopper ``cutlass`` needs no compiler; ``deep_gemm``, which ``auto``
    picks, compiles its kernels with CUDA's nvcc when they are first needed, and is faster (docs/performance.md)."""

    attention_backend: Literal["auto", "group", "FLASH_ATTN", "TRITON_ATTN"] = "auto"
    """Attention kernels on a GPU: vLLM's by their names, which read live KV scales where others freeze them, or
    ``group``: FlashAttention 3, where decode reads a prompt that several sequences have in common once for all of them
    (docs/group_attention.md). ``auto``: that, for models that were measured with it, else ``FLASH_ATTN``."""

    lm_head: Literal["bfloat16", "float32"] = "bfloat16"
    """In what the output head computes logits. ``float32``: nothing is rounded off them, as in trainers whose logits
    are fp32 (MiniMax-M1's report, arXiv 2506.13585); its weights are BF16 in any case. vLLM's ``head_dtype``."""

    block_size: int | None = Field(default=None, ge=16)
    """Tokens of a page of the KV cache; None: vLLM's own choice."""

    staging: Literal["auto", "device", "host", "none"] = "auto"
    """Where a replica puts the next version while it still serves. ``device``: in GPU memory beside the weights, as
    large as each GPU's are, out of ``gpu_memory_utilization``; closed for milliseconds. ``host``: in pinned memory, of
    which a node has one area for all its replicas; closed for as long as PCIe takes, 0.2 s for 10 GB. ``none``: it is
    checked, and read from the files again while closed. ``auto``: ``device`` if that takes at most 40% of the KV
    cache, else ``host``; without the memory for that, ``none``. The engine's log says which, and what each costs; so
    does ``rollout-service inspect --gpu-gb``. On the CPU, memory that is taken for each version and given back."""

    enable_sleep_mode: bool = False
    """``POST /sleep`` has the engines give their memory to a trainer on the same GPUs, and ``POST /wake_up`` take it
    again and load the newest version (docs/colocated.md). vLLM's own allocator has weights and KV cache then."""

    return_sampling_mask: bool = False
    """Each completion comes with the token ids that ``top_k``, ``top_p`` and ``min_p`` left for each of its tokens, so
    that a trainer can renormalize over them (docs/correction.md). It holds for every request: all need ``top_k`` of at
    least 1 and a temperature above 0, and others are refused. Not on the CPU."""

    return_routed_experts: bool = False
    """Requests may ask with ``return_routed_experts`` which experts each token went to, so that a trainer can send it
    to the same ones (docs/correction.md). Engines note it for all tokens then, of cached prompts too: as many bytes of
    host memory as the KV cache has tokens, times layers and experts a token. Mixtures of experts alone; not on the
    CPU."""

    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """More arguments of vLLM, by the names of its AsyncEngineArgs: docs/vllm_settings.md. What the service decides
    itself is refused, with the setting to use instead. ``hf_overrides`` may set what changes no tensor, above all RoPE
    scaling."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes, e.g. ``{"NCCL_SOCKET_IFNAME": "eth0"}``. Those that the service
    sets are refused. Ray logs them: no secrets."""

    seed: int = 0
    """Seeds the engine; requests may carry their own."""

    version_wait_s: float = Field(default=30.0, ge=0)
    """How long a request with ``min_weight_version`` waits for that version before 425."""

    load_limit_s: float = Field(default=1800.0, gt=0)
    """A replica whose engine is closed for longer to load one version is replaced: the load is stuck."""

    max_attempts: int = Field(default=3, ge=1)
    """Generations that a completion may take when replicas abort it or die under it; a refusal is none."""

    replica_wait_s: float = Field(default=600.0, ge=0)
    """How long the rest of a completion that was cut short waits for a replica. Then its tokens go back to the caller
    with ``finish_reason="abort"``. A rollout without tokens waits for as long as it takes."""

    admission_limit: int | None = Field(default=None, ge=1)
    """Sequences (a request counts ``n``) that a replica holds, those that wait in vLLM included. A replica takes
    requests until it holds so many; the others wait in the gateways. None: four times ``max_num_seqs``, since a request
    holds its places until the longest of its completions has ended."""

    @property
    def sequences_per_replica(self) -> int:
        """The admission limit of a replica."""
        return self.admission_limit or 4 * self.max_num_seqs

    @property
    def max_logprobs(self) -> int:
        """The maximum number of top logprobs of a request, as vLLM has it; -1: the whole vocabulary."""
        given = self.extra.get("max_logprobs", 20)
        if isinstance(given, bool) or not isinstance(given, int) or given < -1:
            raise ValueError(f"engine.extra.max_logprobs is {given!r}: give a number, or -1 for the whole vocabulary")
        return given

    @property
    def why_penalties_start_anew(self) -> str | None:
        """Why engines cannot count the tokens that a completion had before it was cut short; None: they can."""
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
    def _experts_need_several_gpus(self) -> "EngineConfig":
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "engine.expert_parallel shares out experts over the GPUs of a replica, and engine.tensor_parallel_size "
                "is 1: raise it, or leave expert_parallel out"
            )
        return self

    @model_validator(mode="after")
    def _graphs_are_not_eager(self) -> "EngineConfig":
        if self.enforce_eager and self.cuda_graph_sizes is not None:
            sizes = list(self.cuda_graph_sizes)
            raise ValueError(f"engine.cuda_graph_sizes={sizes}, but engine.enforce_eager captures none: leave one out")
        return self
