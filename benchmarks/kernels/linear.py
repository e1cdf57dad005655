"""Blockwise FP8 matrix products by CUTLASS and by DeepGEMM, against BF16 by cuBLAS, for a model's layers; on a GPU.

    python -m benchmarks.kernels.linear [--model qwen3-8b] [--tokens 256]

The layers are fused as vLLM fuses them, weights have one scale for 128×128, activations one for 128 of a row, as in
vLLM's linear layers, whose functions are called. Calls follow each other in a CUDA graph that rotates over more weights
than the cache holds. *quantizing* is what the FP8 ones need besides: activations in BF16 to codes and scales.
DeepGEMM compiles each kernel when it is first needed, minutes for all of them; a second run finds them in its cache.
"""

import itertools
import statistics
from collections.abc import Callable
from enum import StrEnum

import torch

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.random_weights import gaussian
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape
from benchmarks.common.timing import buffers_beyond_cache, graph_seconds
from rollout_service.quant.blockwise import BLOCK, quantize_blockwise

LAYERS: dict[Shape, dict[str, tuple[int, int]]] = {
    Shape.QWEN3_8B: {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)},
    Shape.QWEN3_30B_A3B: {"qkv": (5120, 2048), "o": (2048, 4096)},
}
"""Rows and columns of the weight, fused as in vLLM at TP 1; the experts of the second go through Triton."""
REPEATS = 20

Call = Callable[[], torch.Tensor]


class Kernel(StrEnum):
    """What is called."""

    BF16 = "bf16"
    CUTLASS = "cutlass"
    DEEP_GEMM = "deep_gemm"
    QUANTIZING = "quantizing"


class ProductOptions(Options):
    """Matrix products; each may be repeated."""

    model: tuple[Shape, ...] = tuple(LAYERS)
    """Whose layers."""
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 8192)
    """Of a step."""


def bf16(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """What an unquantized layer calls."""
    return lambda: torch.nn.functional.linear(x, weight)


def quantizing(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """Activations alone, as for CUTLASS."""
    return lambda: quantized(x)[0]


def cutlass(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """As vLLM's ``CutlassFp8BlockScaledMMKernel``."""
    from vllm import _custom_ops

    (codes, scales), (weight_codes, weight_scales) = quantized(x), quantize_blockwise(weight)
    return lambda: _custom_ops.cutlass_scaled_mm(
        codes, weight_codes.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales.T
    )


def deep_gemm(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """As vLLM's ``DeepGemmFp8BlockScaledMMKernel`` with fp32 scales."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import fp8_gemm_nt

    given = quantized(x, tma_aligned_scales=True)
    weights = deepgemm_post_process_fp8_weight_block(*quantize_blockwise(weight), (BLOCK, BLOCK), use_e8m0=False)
    out = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device="cuda")

    def call() -> torch.Tensor:
        fp8_gemm_nt(given, weights, out, is_deep_gemm_e8m0_used=False)
        return out

    return call


def quantized(x: torch.Tensor, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of activations, by vLLM."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    codes, scales = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, use_ue8m0=False, **how)
    return codes, scales


KERNELS: dict[Kernel, Callable[[torch.Tensor, torch.Tensor], Call]] = {
    Kernel.BF16: bf16,
    Kernel.CUTLASS: cutlass,
    Kernel.DEEP_GEMM: deep_gemm,
    Kernel.QUANTIZING: quantizing,
}


def measure(kernel: Kernel, tokens: int, weights: list[torch.Tensor]) -> Json:
    """Return the seconds of each sample, and the error: ‖out − reference‖ / ‖reference‖, in fp32 from BF16 operands.

    ``refused`` says why vLLM refuses a kernel, or why it cannot be compiled.
    """
    rows, columns = weights[0].shape
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
    found: Json = {"seconds": [], "error": None, "refused": None}
    try:
        calls = [KERNELS[kernel](x, weight) for weight in weights]
        if kernel != Kernel.QUANTIZING:
            reference = x.float() @ weights[0].float().T
            found["error"] = float((calls[0]().float() - reference).norm() / reference.norm())
    except (RuntimeError, ValueError, ImportError) as error:
        return found | {"refused": str(error).splitlines()[0][:200]}
    found["seconds"] = graph_seconds(calls, REPEATS)
    if kernel != Kernel.QUANTIZING:
        found["tflops"] = 2e-12 * rows * columns * tokens / statistics.median(found["seconds"])
    return found


def main(options: ProductOptions) -> None:
    """Measure, and write benchmarks/results/<machine>/kernels_linear.json."""
    cases = list[Json]()
    for name in options.model:
        for layer, (rows, columns) in LAYERS[name].items():
            weights = [gaussian((rows, columns)) for _ in range(buffers_beyond_cache(rows * columns))]  # in FP8
            for tokens, kernel in itertools.product(options.tokens, Kernel):
                case: Json = {"model": name, "layer": layer, "rows": rows, "columns": columns, "tokens": tokens}
                case |= {"kernel": kernel} | measure(kernel, tokens, weights)
                print(results.brief(case), flush=True)
                cases.append(case)
    results.write("kernels_linear", {"cases": cases})


if __name__ == "__main__":
    run(main)
