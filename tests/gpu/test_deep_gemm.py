"""DeepGEMM's kernels: compiled by several processes into an empty cache, with the bits of CUTLASS's."""

from pathlib import Path

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import fp8_gemm_nt

from rollout_service.engine.kernels import deep_gemm
from rollout_service.quant.blockwise import quantize_blockwise
from tests.support.nvcc import needs_nvcc

SIZES = [(tokens, rows, 1024) for rows in (512, 1536) for tokens in (1, 8, 64, 700)]

pytestmark = needs_nvcc


def test_processes_compile_all_kernels_of_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    marker = tmp_path / "marker"
    deep_gemm.compile_once(SIZES, 4, marker)
    assert marker.read_bytes()
    compiled = sorted(tmp_path.rglob("*.cubin"))
    assert compiled
    deep_gemm.compile_once(SIZES, 1, tmp_path / "another")
    assert sorted(tmp_path.rglob("*.cubin")) == compiled


@pytest.mark.parametrize(("rows", "columns"), [(512, 1024), (4096, 2048), (4096, 12288)])
@pytest.mark.parametrize("tokens", [1, 20, 256, 1000])
def test_products_have_the_bits_of_cutlass(tokens, rows, columns):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(number, columns, generator=generator, device="cuda").bfloat16() for number in (tokens, rows)
    )
    codes, scales = quantize_blockwise(weight)
    inputs, input_scales = per_token_group_quant_fp8(hidden, 128, column_major_scales=True, use_ue8m0=False)
    expected = ops.cutlass_scaled_mm(inputs, codes.T, out_dtype=torch.bfloat16, scale_a=input_scales, scale_b=scales.T)
    inputs, input_scales = per_token_group_quant_fp8(
        hidden, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
    )
    found = torch.empty_like(expected)
    fp8_gemm_nt((inputs, input_scales), (codes, scales), found, is_deep_gemm_e8m0_used=False)
    assert torch.equal(found, expected)
