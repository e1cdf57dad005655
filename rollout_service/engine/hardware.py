"""What a GPU must have for a configuration: ``doctor`` asks before anything starts, a replica when it starts.

Facts of vLLM 0.32: its kernels' ``is_supported`` in model_executor/kernels/linear, ``FlashAttentionBackend`` in
v1/attention/backends/flash_attn.py. Needs neither torch nor vllm.
"""

from collections.abc import Iterator

from rollout_service.config import ServiceConfig

Capability = tuple[int, int]
"""CUDA's compute capability."""

BF16: Capability = (8, 0)
"""From which on a GPU computes in BF16, as every engine does: Ampere."""
FP8: Capability = (8, 9)
"""From which on it multiplies FP8: Ada."""
FP8_BLOCKS: Capability = (9, 0)
"""From which on CUTLASS and DeepGEMM multiply FP8 blocks: Hopper."""
FLASH_ATTENTION_FP8 = (9, 10)
"""Major ones for which FlashAttention reads an FP8 cache: Hopper, and Blackwell of data centers."""
FLASH_ATTENTION_HEAD = 512
"""Largest head of FlashAttention 4. Where vLLM has 2 or 3 alone it refuses those above 256 itself."""


def why_unfit(
    config: ServiceConfig, capability: Capability, head_size: int | None = None, *, latent: bool = False
) -> tuple[str, str] | None:
    """Why no engine can start on such a GPU, and what to set; None: one can.

    ``head_size``: of attention; None: not known. ``latent``: attention is latent (MLA), and vLLM chooses its kernel.
    """
    return next(_reasons(config, capability, head_size, latent), None)


def require_fit(config: ServiceConfig, capability: Capability, head_size: int | None, *, latent: bool) -> None:
    """Raise ValueError with what ``why_unfit`` says."""
    unfit = why_unfit(config, capability, head_size, latent=latent)
    if unfit is not None:
        why, advice = unfit
        raise ValueError(f"this GPU has compute capability {'.'.join(map(str, capability))}: {why}: set {advice}")


def _reasons(
    config: ServiceConfig, capability: Capability, head_size: int | None, latent: bool
) -> Iterator[tuple[str, str]]:
    fp8_cache, fp8_weights = config.kv_cache.dtype != "bfloat16", config.quant.weights == "fp8_block"
    backend, by_flash = config.engine.linear_backend, config.engine.attention_backend != "TRITON_ATTN"
    if capability < BF16:
        yield "it has no BF16, in which all engines compute and which begins with 8.0", "another GPU"
    if capability < FP8 and (fp8_cache or fp8_weights):
        yield "it has no FP8, which begins with 8.9", "quant.weights: none and kv_cache.dtype: bfloat16"
    if capability < FP8_BLOCKS and fp8_weights and backend != "triton":
        kernel = (
            "Marlin, which vLLM takes by itself, keeps activations in BF16, and no update was tried with its layout"
        )
        if backend != "auto":
            kernel = f"{backend} multiplies FP8 blocks from 9.0 on"
        yield kernel, "engine.linear_backend: triton, or quant.weights: none"
    if fp8_cache and by_flash and not latent and capability[0] not in FLASH_ATTENTION_FP8:
        advice = "engine.attention_backend: TRITON_ATTN, or kv_cache.dtype: bfloat16"
        yield "FlashAttention reads no FP8 cache on it", advice
    if by_flash and not latent and head_size is not None and (head_size % 8 or head_size > FLASH_ATTENTION_HEAD):
        yield (
            f"FlashAttention's heads are multiples of 8 up to {FLASH_ATTENTION_HEAD}, and the model's have {head_size}",
            "engine.attention_backend: TRITON_ATTN",
        )
