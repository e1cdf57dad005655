"""How near the quantizer comes to memory speed: against a plain copy, a simple kernel, and vLLM's own.

    python -m benchmarks.quantizer          on the GPU where there is one, else on the CPU

``ours`` is blockwise FP8; ``ours, fp8_channel`` and ``ours, int8_channel`` have a scale for each output channel. A
quantizer reads 2 bytes and writes 1 a weight; a copy of 1.5 bytes a weight moves as many. Every figure is bytes moved a
second over that of a large copy in the same run. On a GPU, all linear layers of a model are one
``GroupedQuantization.run()``.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, gaussian, write_config
from benchmarks.common.timing import copy_seconds, event_seconds, wall_seconds
from rollout_service.model.served_model import ServedModel
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.formats import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, WeightFormat

BYTES_A_WEIGHT = 3
FORMATS = {"ours": FP8_BLOCK, "ours, fp8_channel": FP8_CHANNEL, "ours, int8_channel": INT8_CHANNEL}
CPU_SHAPES = ((256, 768), (4096, 4096), (12288, 4096))
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}

Shapes = Sequence[tuple[int, ...]]
MODELS = (Shape.QWEN3_8B, Shape.QWEN3_30B_A3B)


def vllm(weight: torch.Tensor) -> Any:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(weight, [128, 128])


def gpu_cases(copy_gb_s: float, repeats: int) -> Iterator[Json]:
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            shapes = list(ServedModel.load(write_config(name, Path(folder))).linears.values())
        yield from model_cases(name, shapes, copy_gb_s, repeats)


def model_cases(name: str, shapes: Shapes, copy_gb_s: float, repeats: int) -> Iterator[Json]:
    """Measure all linear layers of a model: ours in one call, the others matrix by matrix."""
    from benchmarks.quantizer.yardstick_kernel import yardstick
    from rollout_service.quant.cuda import GroupedQuantization

    weights = list(carve(gaussian((sum(r * c for r, c in shapes),)), shapes))
    moved = sum(w.numel() for w in weights) * BYTES_A_WEIGHT
    for kernel, form in FORMATS.items():
        prepared = GroupedQuantization(weights, *outputs(weights, form), form=form)
        counts = {"matrices": len(weights), "launches": prepared.launches}
        yield case(name, kernel, moved, event_seconds(prepared.run, repeats), copy_gb_s) | counts
        del prepared
    codes, scales = outputs(weights, FP8_BLOCK)
    triples = list(zip(weights, codes, scales, strict=True))

    def by_yardstick() -> None:
        for triple in triples:
            yardstick(*triple)

    others: dict[str, Callable[[], Any]] = {
        "yardstick": by_yardstick,
        "vllm": lambda: [vllm(w) and None for w in weights],
    }
    for kernel, call in others.items():
        yield case(name, kernel, moved, event_seconds(call, min(repeats, 3)), copy_gb_s)


def outputs(weights: list[torch.Tensor], form: WeightFormat) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and scales of all weights, in one bucket each."""
    codes = torch.empty(sum(w.numel() for w in weights), dtype=form.dtype, device="cuda")
    shapes = [form.scale_shape(tuple(w.shape)) for w in weights]
    scales = torch.empty(sum(math.prod(shape) for shape in shapes), device="cuda")
    return list(carve(codes, [tuple(w.shape) for w in weights])), list(carve(scales, shapes))


def carve(bucket: torch.Tensor, shapes: Shapes) -> Iterator[torch.Tensor]:
    """Consecutive pieces of a bucket."""
    offset = 0
    for rows, columns in shapes:
        yield bucket[offset : offset + rows * columns].view(rows, columns)
        offset += rows * columns


def cpu_cases(copy_gb_s: float, repeats: int) -> Iterator[Json]:
    """Measure ours against the reference and vLLM's function, which is plain torch."""
    from rollout_service.quant.cpu import quantize_blocks_cpu

    for shape in CPU_SHAPES:
        weight = torch.randn(shape).mul_(0.02).to(torch.bfloat16)
        moved = weight.numel() * BYTES_A_WEIGHT
        half = moved // 2
        source, target = torch.zeros(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)
        kernels: dict[str, Callable[[], Any]] = {
            "copy of as many bytes": partial(target.copy_, source),
            "ours": partial(quantize_blocks_cpu, weight),
            "reference": partial(quantize_blockwise, weight),
            "vllm": partial(vllm, weight),
        }
        for kernel, call in kernels.items():
            yield case(f"{shape[0]}x{shape[1]}", kernel, moved, wall_seconds(call, repeats), copy_gb_s)


def case(name: str, kernel: str, moved: int, seconds: list[float], copy_gb_s: float) -> Json:
    gb_s = moved / statistics.median(seconds) / 1e9
    return {"name": name, "kernel": kernel, "gb_s": gb_s, "ratio_to_copy": gb_s / copy_gb_s, "seconds": seconds}


def main(repeats: int = 21) -> None:
    """Measure, and write benchmarks/results/<machine>/quantizer.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # read plus written, of a copy far larger than any cache
    copy_gb_s = 2 * COPY_BYTES[device] / copy_seconds(COPY_BYTES[device], device, repeats) / 1e9
    cases: list[Json] = []
    for measured in (gpu_cases if device == "cuda" else cpu_cases)(copy_gb_s, repeats):
        print(results.brief(measured), flush=True)
        cases.append(measured)
    results.write("quantizer", {"copy_gb_s": copy_gb_s, "cases": cases})


if __name__ == "__main__":
    run(main)
