"""Which GPUs fit which configuration, by compute capability."""

from typing import Any

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine import hardware
from rollout_service.engine.hardware import (
    FLASH_ATTENTION_4,
    has_nvcc,
    linear_backend,
    require_fit,
    why_unfit,
)

FP8_BY_CHANNEL = {"quant": {"weights": "fp8_channel"}, "kv_cache": {"dtype": "bfloat16"}}
INT8 = {"quant": {"weights": "int8_channel"}, "kv_cache": {"dtype": "bfloat16"}}
BF16 = {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}}
BY_TRITON = {"engine": {"linear_backend": "triton", "attention_backend": "TRITON_ATTN"}}
BF16_CACHE = {"kv_cache": {"dtype": "bfloat16"}}


def config(**sections: dict[str, Any]) -> ServiceConfig:
    return ServiceConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("capability", "sections"),
    [
        ((8, 0), BF16),
        ((8, 0), INT8),
        ((12, 0), INT8 | {"engine": {"linear_backend": "triton"}}),
        ((8, 9), BF16),
        ((8, 9), BY_TRITON),
        ((8, 9), FP8_BY_CHANNEL),
        ((12, 0), FP8_BY_CHANNEL),
        ((9, 0), {}),
        ((9, 0), BY_TRITON),
        ((10, 0), {}),
        ((12, 0), BF16_CACHE),
        ((12, 0), BY_TRITON),
    ],
)
def test_a_gpu_that_has_what_is_asked_for_is_fit(capability, sections):
    assert why_unfit(config(**sections), capability, {"head_dim": 128}, flash_attention_4=True) is None


@pytest.mark.parametrize(
    ("capability", "sections", "why", "advice"),
    [
        ((7, 5), BF16, "no BF16", "another GPU"),
        ((8, 0), {}, "no FP8", "quant.weights: int8_channel, or none, and kv_cache.dtype: bfloat16"),
        ((8, 6), BF16_CACHE, "no FP8", "quant.weights: int8_channel, or none, and"),
        ((10, 0), INT8, "CUTLASS multiplies no INT8", "engine.linear_backend: triton, or quant.weights: fp8_block"),
        ((8, 6), FP8_BY_CHANNEL, "no FP8", "quant.weights: int8_channel, or none, and"),
        ((8, 6), BF16 | {"kv_cache": {"dtype": "auto"}}, "no FP8", "kv_cache.dtype: bfloat16"),
        ((8, 9), BF16_CACHE, "cutlass multiplies", "linear_backend: triton, or quant.weights: fp8_channel, or none"),
        ((8, 9), {"engine": {"linear_backend": "cutlass"}}, "cutlass multiplies FP8 blocks from 9.0 on", "triton"),
        ((8, 9), {"quant": {"weights": "none"}}, "FlashAttention reads no FP8 cache", "TRITON_ATTN, or kv_cache.dtype"),
        ((12, 0), {}, "FlashAttention reads no FP8 cache", "TRITON_ATTN"),
        ((10, 0), {"engine": {"attention_backend": "group"}}, "group, which needs FlashAttention 3", "it to auto"),
    ],
)
def test_a_gpu_that_lacks_something_is_told_apart(capability, sections, why, advice):
    unfit = why_unfit(config(**sections), capability)
    assert unfit is not None and why in unfit[0] and advice in unfit[1]
    number = ".".join(map(str, capability))
    with pytest.raises(ValueError, match=f"this GPU has compute capability {number}: .*{why}.*: set "):
        require_fit(config(**sections), capability, {})


def test_heads_and_compilers_that_flash_attention_lacks_need_triton_but_not_latent_attention():
    for capability, model, flash_attention_4, why in [
        ((9, 0), {"head_dim": 100}, None, "the model's have 100"),
        ((9, 0), {"head_dim": 1024}, None, "the model's have 1024"),
        ((10, 0), {}, False, FLASH_ATTENTION_4),
    ]:
        unfit = why_unfit(config(), capability, model, flash_attention_4=flash_attention_4)
        assert unfit is not None and why in unfit[0] and "TRITON_ATTN" in unfit[1]
        assert why_unfit(config(**BY_TRITON), capability, model, flash_attention_4=flash_attention_4) is None
    assert why_unfit(config(), (9, 0), flash_attention_4=False) is None
    assert why_unfit(config(), (12, 0), {"head_dim": 100, "kv_lora_rank": 512}) is None


@pytest.mark.parametrize(
    ("capability", "sections", "compiler", "backend"),
    [
        ((9, 0), {}, True, "auto"),
        ((9, 0), {}, False, "cutlass"),
        ((9, 0), {"engine": {"deterministic": True}}, True, "cutlass"),
        ((9, 0), FP8_BY_CHANNEL, True, "cutlass"),
        ((9, 0), {"engine": {"linear_backend": "deep_gemm"}}, False, "deep_gemm"),
        ((10, 0), {}, True, "cutlass"),
    ],
)
def test_deep_gemm_is_chosen_where_it_can_be_compiled(capability, sections, compiler, backend, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvcc", lambda: compiler)
    assert linear_backend(config(**sections), capability) == backend


@pytest.mark.parametrize(("shown", "taken"), [("release 12.9, V12.9.41", True), ("release 12.8, V12.8.9", False)])
def test_the_compiler_is_found_where_deep_gemm_looks(shown, taken, program, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    program("nvcc", f"echo Cuda compilation tools, {shown}")
    assert not has_nvcc()  # CUDA_HOME goes before PATH
    monkeypatch.delenv("CUDA_HOME")
    assert has_nvcc() is taken
