"""vLLM's engine arguments, derived from the service's configuration."""

import logging
import re
import shutil

from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig, LoggingConfig, WeightTransferConfig
from vllm.platforms import current_platform

from rollout_service.compat.vllm_internals import CallableInductorPass
from rollout_service.compat.vllm_scheduler import KV_MAX_AGE, KeepingOffloadingConnector, make_scheduler
from rollout_service.config import ServiceConfig
from rollout_service.engine.attention.choice import (
    AttentionChoice,
    attention_choice,
    attention_settings,
    has_latent_attention,
)
from rollout_service.engine.cpu.processor import why_no_fp8_cache
from rollout_service.engine.extra import INDUCTOR, with_extra
from rollout_service.engine.hardware import Capability, linear_backend, require_fit
from rollout_service.engine.kernels.graph_pass import replace_quantizing_operators
from rollout_service.engine.plugin import (
    CPU_BF16,
    CPU_BLOCK_FP8,
    CPU_CHANNEL,
    PARTIAL_PENALTIES,
    STAGING_KEY,
    TRANSFER_BACKEND,
)
from rollout_service.engine.worker import VersionStaging
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import EXPERT_COUNTS, ServedModel
from rollout_service.protocol.mismatch import FIRST_KV_AGE
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import WEIGHT_FORMATS, WeightFormat
from rollout_service.store.log_place import SHARED_MEMORY

BLOCK_FP8 = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""vLLM's serialized block-FP8 format. It loads our codes and scales unchanged, and keeps KV scales loadable. The online
``fp8_per_block`` resets them at each update. On the CPU our subclass of vLLM's method reads it."""

COMPILER_PASS = "post_grad_custom_post_pass"
"""Key of the compiler's pass that vLLM runs after its own passes."""
_GRAPH_SETTINGS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
"""Keys of vLLM's ``compilation_config`` that choose the sizes; vLLM takes them from one place alone."""
_LARGEST_GRAPH = 512
"""Largest default CUDA graph in tokens. vLLM 0.32 captures no larger step by itself."""

logger = logging.getLogger(__name__)


def engine_args(config: ServiceConfig, not_converted: tuple[str, ...], has_tokenizer: bool) -> AsyncEngineArgs:
    """Return the arguments of one engine. It starts with dummy weights; the replica loads the newest version before
    serving.

    Raises ValueError for a combination that vLLM does not support on this platform or GPU.
    """
    engine = config.engine
    on_cpu = current_platform.is_cpu()
    if (capability := _capability()) is not None:
        require_fit(config, capability, attention_settings(config.model.path))
    refuse_batch_invariance(config, on_cpu, _has(config, *EXPERT_COUNTS))
    owned = dict[str, object](
        model=str(config.model.path),
        load_format="dummy",
        skip_tokenizer_init=not has_tokenizer,
        dtype="bfloat16",
        seed=engine.seed,
        language_model_only=True,  # only affects multimodal models
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_logprobs=engine.max_logprobs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_dtype=_kv_cache_dtype(config, on_cpu),
        block_size=engine.block_size,
        tensor_parallel_size=engine.tensor_parallel_size,
        enable_expert_parallel=engine.expert_parallel,
        distributed_executor_backend="mp" if engine.tensor_parallel_size > 1 else None,
        # on the CPU, torch.compile keeps the packed weights from before an update (notes/vllm, §3)
        enforce_eager=engine.enforce_eager or on_cpu,
        cudagraph_capture_sizes=_graph_sizes(config, on_cpu),
        compilation_config=_compilation(config, on_cpu),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enable_sleep_mode=engine.enable_sleep_mode and not on_cpu,  # engine/sleeping.py needs no allocator on the CPU
        hf_overrides=_quantization(config, not_converted, on_cpu) | _head(config),
        # importance ratios need the logprobs of the sampling distribution, including temperature
        logprobs_mode="processed_logprobs",
        return_sampling_mask=_returns_masks(config, on_cpu),
        logits_processors=[PARTIAL_PENALTIES] if engine.why_penalties_start_anew is None else [],
        enable_return_routed_experts=_returns_experts(config, on_cpu),
        # the model's generation_config.json must not override a trainer's request
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        worker_extension_cls=f"{VersionStaging.__module__}.{VersionStaging.__qualname__}",
        additional_config=_staging(config, on_cpu) | _kv_age(config),
        logging_config=LoggingConfig(configure_logging=False),  # configured by the environment, see logs.py
        reasoning_parser=config.chat.reasoning_parser or "",  # structured outputs begin after the reasoning
        enable_prefix_caching=True,
        scheduler_cls=f"{make_scheduler.__module__}.{make_scheduler.__qualname__}",
        scheduling_policy="priority",  # with equal priorities it schedules in order of arrival, like the default policy
        disable_log_stats=True,
        kv_transfer_config=_offloading(config, on_cpu),
        **_adapters(config, on_cpu),
        **_attention(config),
        **_kernels(config, on_cpu),
    )
    return AsyncEngineArgs(**with_extra(owned, config, on_cpu))


def _adapters(config: ServiceConfig, on_cpu: bool) -> dict[str, object]:
    adapters = config.engine.adapters
    if not adapters.max_live:
        return {}
    linears = ServedModel.of(config.model).linears
    # as many places as versions, so that vLLM never evicts one. On the CPU, tokens without an adapter read the last
    # place: vLLM's kernels there index with -1, so it must stay empty
    places = adapters.max_live + on_cpu
    return {
        "enable_lora": True,
        "max_loras": places,
        "max_cpu_loras": places,
        "max_lora_rank": adapters.max_rank,
        # without embeddings, output head and experts, whose adapters are refused
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in linears if ".experts." not in name}),
    }


def not_converted(model: ServedModel, plan: QuantPlan) -> tuple[str, ...]:
    """Return the modules that vLLM must leave in BF16: those that the plan leaves, and the routers.

    A router is never in a plan. vLLM still quantizes Qwen3-MoE's routers to FP8 unless this list has them. The
    config.json of published FP8 checkpoints lists them, too.
    """
    return tuple(sorted({*plan.not_converted, *model.routers}))


def _kv_age(config: ServiceConfig) -> dict[str, object]:
    """Return the setting of ``KeepingScheduler``; empty without it."""
    weights = config.weights
    if weights.kv_cache_on_update == "drop":
        return {}
    return {KV_MAX_AGE: FIRST_KV_AGE if weights.kv_max_age == "auto" else weights.kv_max_age}


def _offloading(config: ServiceConfig, on_cpu: bool) -> KVTransferConfig | None:
    gib = config.engine.kv_offload_gib
    if gib is None:
        return None
    if on_cpu:
        raise ValueError(
            f"engine.kv_offload_gib is {gib:g}, and vLLM offloads the KV cache of GPUs alone: leave it out, and raise "
            "engine.cpu_kv_cache_gib"
        )
    if (free := shutil.disk_usage(SHARED_MEMORY).free / 2**30) < gib:
        raise ValueError(
            f"engine.kv_offload_gib is {gib:g}, and {SHARED_MEMORY} has {free:.1f} GiB free: set less, or give the "
            "container more (--shm-size)"
        )
    return KVTransferConfig(
        kv_connector=KeepingOffloadingConnector.__qualname__,
        kv_connector_module_path=KeepingOffloadingConnector.__module__,
        kv_role="kv_both",
        # a completion is a part of its session's next prompt
        kv_connector_extra_config={"cpu_bytes_to_use": int(gib * 2**30), "offload_prompt_only": False},
    )


def _staging(config: ServiceConfig, on_cpu: bool) -> dict[str, object]:
    kind = config.engine.staging
    if kind == "auto" and on_cpu:
        return {STAGING_KEY: "memory"}
    if kind not in ("auto", "none") and on_cpu:
        raise ValueError(
            f"engine.staging is {kind}, and vLLM's CPU kernels keep packed copies of weights that only its own reload "
            "renews: set it to auto"
        )
    return {} if kind == "none" else {STAGING_KEY: kind}


def _returns_masks(config: ServiceConfig, on_cpu: bool) -> bool:
    if config.engine.return_sampling_mask and on_cpu:
        raise ValueError(
            "engine.return_sampling_mask is true, and vLLM returns sampling masks from its Model Runner V2 alone, "
            "which there is not for the CPU: leave it out, and sample without top_p, top_k and min_p"
        )
    return config.engine.return_sampling_mask


def _returns_experts(config: ServiceConfig, on_cpu: bool) -> bool:
    wanted = config.engine.return_routed_experts
    if wanted and not _has(config, *EXPERT_COUNTS):
        raise ValueError(
            f"engine.return_routed_experts is true, and {config.model.path} has no experts: leave it out, or serve a "
            "mixture of experts"
        )
    if wanted and on_cpu:
        raise ValueError(
            "engine.return_routed_experts is true, and vLLM returns routed experts from its Model Runner V2 alone, "
            "which there is not for the CPU: leave it out"
        )
    return wanted


def _compilation(config: ServiceConfig, on_cpu: bool) -> dict[str, object]:
    """Return the settings of vLLM's compiler, to which ``engine.extra.compilation_config`` is added.

    Where activations are quantized in blocks, our kernels do it. They round as vLLM's do.
    """
    if on_cpu or config.quant.weights != "fp8_block" or config.engine.enforce_eager:
        return {}
    return {INDUCTOR: {COMPILER_PASS: CallableInductorPass(replace_quantizing_operators)}}


def _graph_sizes(config: ServiceConfig, on_cpu: bool) -> list[int] | None:
    engine = config.engine
    if engine.cuda_graph_sizes is not None and on_cpu:
        sizes = list(engine.cuda_graph_sizes)
        raise ValueError(f"engine.cuda_graph_sizes is {sizes}, and the CPU has no CUDA graphs: leave it out")
    if engine.cuda_graph_sizes is not None:
        return list(engine.cuda_graph_sizes)
    compilation = engine.extra.get("compilation_config")
    own = isinstance(compilation, dict) and not _GRAPH_SETTINGS.isdisjoint(compilation)
    return None if engine.enforce_eager or on_cpu or own else default_graph_sizes(engine.max_num_seqs)


def default_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return at most 28 CUDA graph sizes in tokens, which cover the range of vLLM's own 51.

    A decode step is bound by memory, so more padding costs little. Each size is captured three times at the start.
    """
    largest = min(2 * max_num_seqs, _LARGEST_GRAPH)
    sizes = {1, 2, 4, 8, *range(16, 257, 16), *range(288, _LARGEST_GRAPH + 1, 32)}
    return sorted({size for size in sizes if size < largest} | {largest})


def _quantization(config: ServiceConfig, not_converted: tuple[str, ...], on_cpu: bool) -> dict[str, object]:
    if config.quant.weights == "none":
        return {"quantization_config": {"quant_method": CPU_BF16}} if on_cpu else {}
    scheme: dict[str, object]
    form = WEIGHT_FORMATS[config.quant.weights]
    if not form.in_blocks:
        if on_cpu:
            scheme = {"quant_method": CPU_CHANNEL, "weights": form.name, "modules_to_not_convert": list(not_converted)}
        else:
            # vLLM identifies a layer's experts by the names of their matrices
            experts = [rf"re:{re.escape(name)}\.\d+\." for name in not_converted if name.endswith(".experts")]
            scheme = {**_channel_scheme(form), "ignore": [*not_converted, *experts]}
        return {"quantization_config": scheme}
    method = CPU_BLOCK_FP8 if on_cpu else "fp8"
    scheme = {"quant_method": method, "modules_to_not_convert": list(not_converted), **BLOCK_FP8}
    return {"quantization_config": scheme}


def _channel_scheme(form: WeightFormat) -> dict[str, object]:
    """Return the format of compressed-tensors' W8A8 checkpoints, as vLLM reads it on a GPU."""
    kind = "float" if form.dtype.is_floating_point else "int"
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"group_0": group}}


def _head(config: ServiceConfig) -> dict[str, object]:
    return {} if config.engine.lm_head == "bfloat16" else {"head_dtype": config.engine.lm_head}


def _kv_cache_dtype(config: ServiceConfig, on_cpu: bool) -> str:
    """Return vLLM's KV cache dtype. Its ``auto`` is the model's own dtype."""
    dtype = config.kv_cache.dtype
    if on_cpu and has_latent_attention(attention_settings(config.model.path)):
        if dtype == "fp8_e4m3":
            raise ValueError(
                f"{config.model.path} has latent attention (MLA), whose KV cache vLLM keeps in BF16 on the CPU: set "
                "kv_cache.dtype: auto"
            )
        return "auto"
    if dtype == "fp8_e4m3" and (why := why_no_fp8_cache()) is not None:  # a replica has already resolved "auto"
        raise ValueError(f"kv_cache.dtype is fp8_e4m3, and {why}: set it to auto or to bfloat16")
    return "auto" if dtype == "bfloat16" else "fp8_e4m3"


def _has(config: ServiceConfig, *keys: str) -> bool:
    """Return True if the model's config.json has one of these keys."""
    return not attention_settings(config.model.path).keys().isdisjoint(keys)


def _attention(config: ServiceConfig) -> dict[str, object]:
    choice = attention_of(config)
    logger.info("attention of %s: %s", choice.backend or "vLLM's choice", choice.why)
    return {} if choice.backend is None else {"attention_backend": choice.backend}


def attention_of(config: ServiceConfig) -> AttentionChoice:
    """Return the attention backend of an engine on this machine, with the reason. Raises ValueError as
    ``attention_choice``."""
    on_cpu = current_platform.is_cpu()
    return attention_choice(config, attention_settings(config.model.path), on_cpu=on_cpu, capability=_capability())


def _capability() -> Capability | None:
    """Return the GPU's compute capability. None: there is no GPU."""
    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def _kernels(config: ServiceConfig, on_cpu: bool) -> dict[str, object]:
    linear = config.engine.linear_backend
    if linear != "auto" and on_cpu:
        raise ValueError(f"engine.linear_backend is {linear}, and the CPU has no choice of kernels: leave it out")
    if linear != "auto" and config.quant.weights == "none":
        logger.warning("engine.linear_backend is %s, which has no effect: quant.weights is none", linear)
    if on_cpu or config.quant.weights == "none":
        return {}
    if (capability := _capability()) is not None:
        linear = linear_backend(config, capability)
        logger.info("linear layers: %s", "DeepGEMM where sizes allow it" if linear == "auto" else linear)
    # other expert kernels keep strides or scales from before an update in captured CUDA graphs (vLLM issue 41670)
    return {"kernel_config": {"linear_backend": linear, "moe_backend": "triton"}}


def refuse_batch_invariance(config: ServiceConfig, on_cpu: bool, has_experts: bool) -> None:
    """Raise ValueError if vLLM 0.32 cannot keep the result of a sequence independent of the rest of its batch.

    The service uses FlashAttention or Triton attention, which support it (``supports_batch_invariance``). For latent
    attention, vLLM chooses a kernel that supports it, or refuses.
    """
    if not config.engine.deterministic:
        return
    if on_cpu:
        raise ValueError(
            "engine.deterministic is true, and vLLM has no batch-invariant kernels for the CPU: leave it out"
        )
    if has_experts and config.quant.weights in ("fp8_block", "fp8_channel"):
        raise ValueError(
            "engine.deterministic is true, and vLLM does not keep it for experts in FP8 (its issues 57016 and 57092): "
            "set quant.weights: none, or leave it out"
        )
