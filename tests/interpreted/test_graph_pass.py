"""The compiler pass in graphs that Inductor compiles, with vLLM's operators declared as in its CUDA build."""

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.inductor_pass import CallableInductorPass
from vllm.config import CompilationConfig

from rollout_service.engine.kernels import block_quant
from rollout_service.engine.kernels.graph_pass import LIBRARY, replace_quantizing_operators

SCHEMAS = {
    "rms_norm_per_block_quant": (
        "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, "
        "Tensor!? residual, int group_size, bool is_scale_transposed) -> ()"
    ),
    "silu_and_mul_per_block_quant": (
        "(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub, bool is_scale_transposed) -> ()"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _operators():
    """Declare vLLM's operators, which only run when nothing replaces them, and run ours on the CPU."""
    theirs, ours = torch.library.Library("_C", "FRAGMENT"), torch.library.Library(LIBRARY, "IMPL")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops._C, name):
            theirs.define(name + schema)
        theirs.impl(name, _must_not_run, "CPU")
        torch.library.register_fake(f"_C::{name}", lambda *args, **kwargs: None, lib=theirs)
        ours.impl(name, getattr(block_quant, name), "CPU")
    yield
    for library in (theirs, ours):
        library._destroy()


def _must_not_run(*args):
    raise AssertionError("vLLM's operator ran")


def compiled(function):
    passes = {"post_grad_custom_post_pass": CallableInductorPass(replace_quantizing_operators)}
    return torch.compile(function, fullgraph=True, options=passes)


def silu(both, group_size=128):
    codes = torch.empty(both.shape[0], both.shape[1] // 2, dtype=torch.float8_e4m3fn)
    scales = torch.empty(codes.shape[1] // group_size, codes.shape[0]).permute(-1, -2)
    operator = torch.ops._C.silu_and_mul_per_block_quant.default
    found = auto_functionalized(
        operator,
        out=codes,
        input=both,
        scales=scales,
        group_size=group_size,
        scale_ub=None,
        is_scale_transposed=True,
    )
    return found[1], found[2]


def norm(x, weight, residual):
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[1] // 128, x.shape[0]).permute(-1, -2)
    found = auto_functionalized(
        torch.ops._C.rms_norm_per_block_quant.default,
        result=codes,
        input=x,
        weight=weight,
        scale=scales,
        epsilon=1e-6,
        scale_ub=None,
        residual=residual,
        group_size=128,
        is_scale_transposed=True,
    )
    return found[1], found[2], found[3]


def test_silu_of_a_compiled_graph_runs_in_our_kernel():
    both = torch.randn(2, 512).bfloat16()
    expected = torch.empty(2, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    block_quant.silu_and_mul_per_block_quant(expected[0], both, expected[1], 128)
    codes, scales = compiled(silu)(both)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])
    assert scales.stride() == (1, 2)


def test_a_norm_of_a_compiled_graph_runs_in_our_kernel():
    x, residual = (torch.randn(2, 256).bfloat16() for _ in range(2))
    weight = torch.ones(256).bfloat16()
    codes, _, total = compiled(norm)(x, weight, residual.clone())
    assert torch.equal(total, (x.float() + residual.float()).bfloat16())
    assert codes.float().abs().amax() == 448


def test_other_group_sizes_keep_vllms_operator():
    with pytest.raises(AssertionError, match="vLLM's operator ran"):
        compiled(silu)(torch.randn(2, 256).bfloat16(), group_size=64)


def test_vllm_hashes_the_pass_for_its_cache():
    passes = {"post_grad_custom_post_pass": CallableInductorPass(replace_quantizing_operators)}
    assert CompilationConfig(inductor_compile_config=passes).compute_hash() != CompilationConfig().compute_hash()
