"""Our kernels that quantize activations beside vLLM's: microseconds, and how many results differ; on a GPU.

    python -m benchmarks.kernels.block_quant

RMSNorm with residual and SiLU, back to back in a CUDA graph. Inputs stay in the GPU's cache
where they fit, as in an engine. *limit* is the bytes that are read and written, by the memory's measured speed.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops  # noqa: F401 - defines torch.ops._C

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_limits import gpu_limits
from benchmarks.common.results import Json
from benchmarks.common.timing import graph_seconds
from rollout_service.engine.kernels import block_quant

Call = Callable[..., None]
EPSILON = 1e-6
HIDDEN, INTERMEDIATE = 4096, 12288
"""Widths of the norm and of SiLU's result, as in Qwen3-8B."""
_CALLS = 20
"""Calls in a graph."""


class KernelOptions(Options):
    """What is measured."""

    tokens: tuple[int, ...] = (1, 16, 256, 1024, 8192)
    """Tokens of a step. May be repeated."""


def norm_arguments(tokens: int, width: int) -> dict[str, Any]:
    """Return arguments of ``rms_norm_per_block_quant``, with scales as CUTLASS reads them."""
    x, residual = (torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(2))
    weight = (1 + torch.randn(width, device="cuda") / 8).bfloat16()
    return {
        "result": torch.empty_like(x, dtype=torch.float8_e4m3fn),
        "input": x,
        "weight": weight,
        "scale": torch.empty(width // 128, tokens, device="cuda").T,
        "epsilon": EPSILON,
        "scale_ub": None,
        "residual": residual,
        "group_size": 128,
        "is_scale_transposed": True,
    }


def silu_arguments(tokens: int, width: int) -> dict[str, Any]:
    """Return arguments of ``silu_and_mul_per_block_quant``."""
    return {
        "out": torch.empty(tokens, width, device="cuda", dtype=torch.float8_e4m3fn),
        "input": torch.randn(tokens, 2 * width, device="cuda").bfloat16(),
        "scales": torch.empty(width // 128, tokens, device="cuda").T,
        "group_size": 128,
        "scale_ub": None,
        "is_scale_transposed": True,
    }


def microseconds_of(call: Call, arguments: dict[str, Any]) -> float:
    """Return the median time of a call."""
    values = list(arguments.values())
    return 1e6 * statistics.median(graph_seconds([lambda: call(*values)] * _CALLS, 20))


def unequal(ours: Call, theirs: Call, arguments: dict[str, Any]) -> dict[str, float]:
    """Return, of each tensor that is written, the share of elements in which the two differ."""
    one, other = ({k: v.clone() if torch.is_tensor(v) else v for k, v in arguments.items()} for _ in range(2))
    for each in (one, other):  # a clone of transposed scales keeps their strides
        assert all(each[k].stride() == v.stride() for k, v in arguments.items() if torch.is_tensor(v))
    ours(*one.values())
    theirs(*other.values())
    found = {}
    for name in ("result", "out", "scale", "scales", "residual"):
        if torch.is_tensor(one.get(name)):
            a, b = (
                x[name].contiguous().view(torch.uint8 if x[name].element_size() == 1 else x[name].dtype)
                for x in (one, other)
            )
            found[name] = (a != b).float().mean().item()
    return found


def main(options: KernelOptions) -> None:
    """Measure, and write benchmarks/results/<machine>/kernels_block_quant.json."""
    bytes_per_s, cases = gpu_limits().bytes_per_s, list[Json]()
    kinds: list[tuple[str, int, Callable[[int, int], dict[str, Any]], int]] = [
        ("rms_norm_per_block_quant", HIDDEN, norm_arguments, 7),
        ("silu_and_mul_per_block_quant", INTERMEDIATE, silu_arguments, 5),
    ]
    for name, width, make, bytes_each in kinds:
        ours, theirs = getattr(block_quant, name), getattr(torch.ops._C, name)
        for tokens in options.tokens:
            given = make(tokens, width)
            microseconds = [microseconds_of(call, given) for call in (ours, theirs)]
            case: Json = {
                "kernel": name,
                "width": width,
                "tokens": tokens,
                "ours_us": microseconds[0],
                "vllm_us": microseconds[1],
                "limit_us": 1e6 * bytes_each * tokens * width / bytes_per_s,
                "unequal": unequal(ours, theirs, make(tokens, width)),
            }
            cases.append(case)
            print(results.brief(case), flush=True)
            results.write("kernels_block_quant", {"cases": cases})


if __name__ == "__main__":
    run(main)
