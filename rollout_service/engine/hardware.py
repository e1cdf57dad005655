"""GPU requirements of a configuration, checked by ``doctor`` before a start and by each replica at its start.

Facts of vLLM 0.32: the kernels' ``is_supported`` in model_executor/kernels/linear, ``FlashAttentionBackend`` in
v1/attention/backends/flash_attn.py. Needs neither torch nor vllm.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata

from rollout_service.config import ServiceConfig
from rollout_service.engine.attention.choice import (
    FLASH_ATTENTION_3,
    AttentionSettings,
    has_latent_attention,
    head_size,
)

Capability = tuple[int, int]
"""CUDA's compute capability."""

BF16: Capability = (8, 0)
"""Minimum capability for BF16, which every engine computes in: Ampere."""
FP8: Capability = (8, 9)
"""Minimum capability for FP8 products: Ada."""
FP8_BLOCKS: Capability = (9, 0)
"""Minimum capability for blockwise FP8 in CUTLASS and DeepGEMM: Hopper."""
INT8_END: Capability = (10, 0)
"""First capability without INT8 products in CUTLASS: Blackwell."""
FLASH_ATTENTION_FP8 = (9, 10)
"""Major capabilities on which FlashAttention reads an FP8 cache: Hopper with version 3, data-center Blackwell with
version 4."""
FLASH_ATTENTION_4 = "nvidia-cutlass-dsl"
"""Package that compiles FlashAttention 4. ``requirements/gpu.txt`` does not include it."""
DEEP_GEMM = 9
"""Major capability of the GPUs whose updates were tried with DeepGEMM: Hopper."""
DEEP_GEMM_NVCC = (12, 9)
"""Minimum version of the compiler that DeepGEMM 2.8, part of vLLM 0.32, runs."""
FLASH_ATTENTION_HEAD = 512
"""Largest head size of FlashAttention 4. With only version 2 or 3, vLLM itself refuses sizes above 256."""


def why_unfit(
    config: ServiceConfig,
    capability: Capability,
    model: AttentionSettings | None = None,
    *,
    flash_attention_4: bool | None = None,
) -> tuple[str, str] | None:
    """Return the reason why no engine can start on this GPU, and the setting to change. None: an engine can start.

    ``model``: None: unknown. ``flash_attention_4``: True if its compiler is installed. None: check.
    """
    if flash_attention_4 is None:
        flash_attention_4 = _is_installed(FLASH_ATTENTION_4)
    reasons = (*_of_weights(config, capability), *_of_attention(config, capability, model or {}, flash_attention_4))
    return next(iter(reasons), None)


def has_nvcc() -> bool:
    """Return True if DeepGEMM finds CUDA's compiler, new enough. It looks where DeepGEMM does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")  # noqa: TID251 - as DeepGEMM does
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        shown = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return False
    release = re.search(r"release (\d+)\.(\d+)", shown)
    return release is not None and (int(release[1]), int(release[2])) >= DEEP_GEMM_NVCC


def linear_backend(config: ServiceConfig, capability: Capability) -> str:
    """Return vLLM's ``linear_backend`` on a GPU.

    ``auto`` is DeepGEMM for FP8 blocks on Hopper, if CUDA's compiler is there, and else CUTLASS. vLLM's own ``auto``
    prefers DeepGEMM, and takes CUTLASS for layers of other sizes.
    """
    chosen = config.engine.linear_backend
    if chosen != "auto":
        return chosen
    fits = capability[0] == DEEP_GEMM and config.quant.weights == "fp8_block" and not config.engine.deterministic
    return "auto" if fits and has_nvcc() else "cutlass"


def require_fit(config: ServiceConfig, capability: Capability, model: AttentionSettings) -> None:
    """Raise ValueError with the result of ``why_unfit``, if any."""
    unfit = why_unfit(config, capability, model)
    if unfit is not None:
        why, advice = unfit
        raise ValueError(f"this GPU has compute capability {'.'.join(map(str, capability))}: {why}: set {advice}")


def _of_weights(config: ServiceConfig, capability: Capability) -> Iterator[tuple[str, str]]:
    weights, backend = config.quant.weights, config.engine.linear_backend
    if capability < BF16:
        yield "it has no BF16, in which all engines compute and which begins with 8.0", "another GPU"
    if capability < FP8 and (weights in ("fp8_block", "fp8_channel") or config.kv_cache.dtype != "bfloat16"):
        yield (
            "it has no FP8, which begins with 8.9",
            "quant.weights: int8_channel, or none, and kv_cache.dtype: bfloat16",
        )
    if capability < FP8_BLOCKS and weights == "fp8_block" and backend != "triton":
        kernel = "cutlass" if backend == "auto" else backend
        yield (
            f"{kernel} multiplies FP8 blocks from 9.0 on",
            "engine.linear_backend: triton, or quant.weights: fp8_channel, or none",
        )
    if capability >= INT8_END and weights == "int8_channel" and backend != "triton":
        yield (
            "CUTLASS multiplies no INT8 from 10.0 on",
            "engine.linear_backend: triton, or quant.weights: fp8_block",
        )


def _of_attention(
    config: ServiceConfig, capability: Capability, model: AttentionSettings, flash_attention_4: bool
) -> Iterator[tuple[str, str]]:
    size, by_triton = head_size(model), "engine.attention_backend: TRITON_ATTN"
    if has_latent_attention(model) or config.engine.attention_backend == "TRITON_ATTN":
        return
    if config.engine.attention_backend == "group" and capability[0] != FLASH_ATTENTION_3:
        yield "engine.attention_backend is group, which needs FlashAttention 3, Hopper's", "it to auto"
    if config.kv_cache.dtype != "bfloat16" and capability[0] not in FLASH_ATTENTION_FP8:
        yield "FlashAttention reads no FP8 cache on it", f"{by_triton}, or kv_cache.dtype: bfloat16"
    if capability[0] == 10 and not flash_attention_4:
        yield f"vLLM takes FlashAttention 4 on it, and {FLASH_ATTENTION_4}, which compiles it, is missing", by_triton
    if size is not None and (size % 8 or size > FLASH_ATTENTION_HEAD):
        found = f"FlashAttention's heads are multiples of 8 up to {FLASH_ATTENTION_HEAD}, and the model's have {size}"
        yield found, by_triton


def _is_installed(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False
