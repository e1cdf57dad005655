"""Blockwise FP8 matrix products by CUTLASS and by DeepGEMM, against BF16 by cuBLAS, for a model's layers; on a GPU.

    python -m benchmarks.kernels.linear

The layers are fused as vLLM fuses them, weights have one scale for 128×128, activations one for 128 of a row, as in
vLLM's linear layers, whose functions are called. Calls follow each other in a CUDA graph that rotates over more weights
than the cache holds. DeepGEMM compiles each kernel when it is first needed, minutes for all of them.
"""

import itertools
import statistics
from collections.abc import Callable

import torch

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, gaussian
from benchmarks.common.timing import buffers_beyond_cache, graph_seconds
from rollout_service.quant.blockwise import BLOCK, quantize_blockwise

LAYERS: dict[Shape, dict[str, tuple[int, int]]] = {
    Shape.QWEN3_8B: {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)},
    Shape.QWEN3_30B_A3B: {"qkv": (5120, 2048), "o": (2048, 4096)},
}
"""Rows and columns of the weight, fused as in vLLM at TP 1; the experts of the second go through Triton."""
TOKENS = (16, 64, 256, 1024, 8192)  # of a step
REPEATS = 20

Call = Callable[[], torch.Tensor]


def bf16(x: torch.Tensor, weight: torch.Tensor) -> Call:
    return lambda: torch.nn.functional.linear(x, weight)


def cutlass(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """Call what vLLM's ``CutlassFp8BlockScaledMMKernel`` calls."""
    from vllm import _custom_ops

    (codes, scales), (weight_codes, weight_scales) = quantized(x), quantize_blockwise(weight)
    return lambda: _custom_ops.cutlass_scaled_mm(
        codes, weight_codes.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales.T
    )


def deep_gemm(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """Call what vLLM's ``DeepGemmFp8BlockScaledMMKernel`` calls, with fp32 scales."""
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


KERNELS = {"bf16": bf16, "cutlass": cutlass, "deep_gemm": deep_gemm}


def measure(kernel: str, tokens: int, weights: list[torch.Tensor]) -> Json:
    """Return the seconds of each sample, and the error: ‖out − reference‖ / ‖reference‖, in fp32 from BF16 operands.

    ``refused`` says why vLLM refuses a kernel, or why it cannot be compiled.
    """
    rows, columns = weights[0].shape
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
    try:
        calls = [KERNELS[kernel](x, weight) for weight in weights]
        reference = x.float() @ weights[0].float().T
        error = float((calls[0]().float() - reference).norm() / reference.norm())
    except (RuntimeError, ValueError, ImportError) as refusal:
        return {"seconds": [], "error": None, "refused": str(refusal).splitlines()[0][:200]}
    seconds = graph_seconds(calls, REPEATS)
    tflops = 2e-12 * rows * columns * tokens / statistics.median(seconds)
    return {"seconds": seconds, "error": error, "refused": None, "tflops": tflops}


def main() -> None:
    """Measure, and write benchmarks/results/<machine>/kernels_linear.json."""
    cases = list[Json]()
    for name in LAYERS:
        for layer, (rows, columns) in LAYERS[name].items():
            weights = [gaussian((rows, columns)) for _ in range(buffers_beyond_cache(rows * columns))]  # in FP8
            for tokens, kernel in itertools.product(TOKENS, KERNELS):
                case: Json = {"model": name, "layer": layer, "rows": rows, "columns": columns, "tokens": tokens}
                case |= {"kernel": kernel} | measure(kernel, tokens, weights)
                print(results.brief(case), flush=True)
                cases.append(case)
    results.write("kernels_linear", {"cases": cases})


if __name__ == "__main__":
    run(main)
