"""The compiler pass that replaces vLLM's quantizing operators by ours, in graphs that vLLM's own passes have fused."""

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from rollout_service.engine.kernels import block_quant
from rollout_service.quant.blockwise import BLOCK

LIBRARY = "rollout_service"
_OPERATORS = {
    "rms_norm_per_block_quant": (
        "(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, float epsilon, Tensor? scale_ub, "
        "Tensor(c!)? residual, int group_size, bool is_scale_transposed) -> ()"
    ),
    "silu_and_mul_per_block_quant": (
        "(Tensor(a!) out, Tensor input, Tensor(b!) scales, int group_size, Tensor? scale_ub=None, "
        "bool is_scale_transposed=False) -> ()"
    ),
}
"""Operator → schema, the same as of vLLM's operator in ``torch.ops._C``. All write into their arguments."""
_library = torch.library.Library(LIBRARY, "DEF")


def _define() -> None:
    for name, schema in _OPERATORS.items():
        _library.define(name + schema)
        _library.impl(name, getattr(block_quant, name), "CUDA")
        torch.library.register_fake(f"{LIBRARY}::{name}", lambda *args, **kwargs: None, lib=_library)


_define()


def replace_quantizing_operators(graph: fx.Graph) -> None:
    """Replace vLLM's operators in place. A pass for ``post_grad_custom_post_pass``, after vLLM's fusion passes."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not auto_functionalized:
            continue
        operator = node.args[0]
        name = operator.__name__.removesuffix(".default")
        if operator.namespace == "_C" and name in _OPERATORS and _is_plain(node):
            node.args = (getattr(getattr(torch.ops, LIBRARY), name).default, *node.args[1:])


def _is_plain(node: fx.Node) -> bool:
    """Return True if our kernels compute it: E4M3, groups of 128, scales without an upper bound."""
    codes = node.kwargs.get("result", node.kwargs.get("out"))
    assert isinstance(codes, fx.Node)
    dtype = codes.meta["val"].dtype if "val" in codes.meta else codes.kwargs.get("dtype")
    return bool(dtype == torch.float8_e4m3fn and node.kwargs["group_size"] == BLOCK and not node.kwargs.get("scale_ub"))
