"""What a trace of kernels is summed up to."""

import pytest
from triton.runtime.jit import KernelInterface

from benchmarks.kernels.decode_profile import kind_of, summary
from rollout_service.engine.attention import fp8_decode, grouping, merging


def _kernel(name: str, ts: float, dur: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}


def test_kernels_are_named_by_what_they_do() -> None:
    kinds = {
        "flash_fwd_splitkv_combine": "FlashAttention",
        "nvjet_sm90_tst_128x152": "matrix products",
        "void vllm::per_token_group_quant_8bit_kernel": "quantizing activations",
        "fused_moe_kernel": "experts",
        "vllm::reshape_and_cache_flash_kernel": "writing the KV cache",
        "triton_red_fused_add_mean_pow": "norms, rotations, activations",
        "triton_red_fused__to_copy_abs_clamp_clone_cutlass_scaled_mm_div_mul": "norms, rotations, activations",
        "_gumbel_sample_kernel": "sampling",
        "_combine_sampled_and_draft_tokens_kernel": "sampling",
        "void flash::prepare_varlen_num_blocks_kernel<16, false>": "FlashAttention",
        "void vllm::silu_and_mul_per_block_quant_kernel<c10::BFloat16>": "quantizing activations",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 6144u>": "matrix products",
        "Memcpy HtoD": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_the_kernels_of_group_attention_have_a_kind_of_their_own() -> None:
    """All that are launched; what they call is part of them."""
    launched = {
        name
        for module in (grouping, merging, fp8_decode)
        for name, value in vars(module).items()
        if isinstance(value, KernelInterface) and not name.startswith("_")
    }
    assert "decode_part" in launched and "choose_prefixes" in launched and "merge_rows" in launched
    assert {kind_of(name) for name in launched} == {"group attention"}


def test_a_step_is_divided_into_kinds_and_idle_time() -> None:
    step = {"cat": "user_annotation", "name": "execute_context_0(0)_generation_8(8)", "ts": 0, "dur": 10}
    events = [
        step,
        {"cat": "cpu_op", "name": "flash", "ts": 0, "dur": 9000},
        _kernel("flash_fwd", 1000, 2000),
        _kernel("cutlass_gemm", 4000, 1000),  # 1000 idle before it
        _kernel("flash_fwd", 4500, 2500),  # half of the other's time beside it
        step,
    ]
    found = summary(events)
    assert found["batches"] == {"execute_context_0(0)_generation_8(8)": 2}
    assert found["step_ms"] == 3.0
    assert found["ms"] == {"FlashAttention": 2.25, "matrix products": 0.5, "idle": 0.5}
    assert found["kernels"][0] == {"name": "flash_fwd", "kind": "FlashAttention", "ms": 2.25, "launches": 1.0}


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="0 kernels of 0 steps"):
        summary([{"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}])
