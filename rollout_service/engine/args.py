"""Our configuration in vLLM's terms."""

from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.platforms import current_platform

from rollout_service.config import ServiceConfig
from rollout_service.engine.plugin import TRANSFER_BACKEND
from rollout_service.quant.blockwise import BLOCK

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""vLLM's serialized block-FP8 format: loads our codes and scales as they are, and keeps KV scales loadable
(the online ``fp8_per_block`` resets them at each update)."""


def engine_args(config: ServiceConfig, not_converted: tuple[str, ...], has_tokenizer: bool) -> AsyncEngineArgs:
    """Arguments of one engine. Weights are dummies: the replica loads the newest version before it serves."""
    engine = config.engine
    on_cpu = current_platform.is_cpu()
    return AsyncEngineArgs(
        model=str(config.model.path),
        load_format="dummy",
        skip_tokenizer_init=not has_tokenizer,
        dtype="bfloat16",
        seed=engine.seed,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_dtype=engine.kv_cache_dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        distributed_executor_backend="mp" if engine.tensor_parallel_size > 1 else None,
        # torch.compile on the CPU keeps the packed weights of before an update (notes/vllm, §3)
        enforce_eager=engine.enforce_eager or on_cpu,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        hf_overrides=_quantization(config, not_converted),
        # importance ratios need the distribution that was sampled from, temperature included
        logprobs_mode="processed_logprobs",
        # the model's generation_config.json must not change what a trainer asked for
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        enable_prefix_caching=True,
        disable_log_stats=True,
        **({} if on_cpu else _gpu_only(config)),
    )


def _quantization(config: ServiceConfig, not_converted: tuple[str, ...]) -> dict[str, Any]:
    if config.quant.weights == "none":
        return {}
    return {"quantization_config": {**BLOCK_FP8, "modules_to_not_convert": list(not_converted)}}


def _gpu_only(config: ServiceConfig) -> dict[str, Any]:
    # FlashAttention reads the live KV scales at each call; FlashInfer freezes them at the first one
    settings: dict[str, Any] = {"attention_backend": "FLASH_ATTN"}
    if config.quant.weights != "none":
        settings["kernel_config"] = {"linear_backend": config.engine.linear_backend}
    return settings


def engine_environment(config: ServiceConfig) -> dict[str, str]:
    """Environment variables that vLLM reads in the replica's processes."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer is not installed: it compiles for minutes on first use
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Hopper: power-of-two scales would requantize our weights in place
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        # tensors cannot cross our RPCs, so nothing needs pickle
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
