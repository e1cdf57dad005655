"""What a decode step costs with logits in fp32 (``engine.lm_head: float32``): the bare engine on a GPU.

    python -m benchmarks.kernels.lm_head [--layers 8]

An engine with each head samples two lengths of the same 256 sequences, several times in turn; a step takes the
difference of the fastest of each over the difference of their lengths, so that prompts, the first step and the last are
in neither. Dummy weights, CUDA graphs, FP8 with a BF16 cache. The head does not depend on the number of layers: with
few of them the engines start sooner, and ``added_ms`` is the same.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine
from benchmarks.common.gpu_service import Mode, graph_sizes, settings_of
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import PUBLISHED, random_prompts
from rollout_service.config import ServiceConfig
from rollout_service.protocol.sampling import Sampling

HEADS = ("bfloat16", "float32")
PROMPT = 64
"""Tokens; short, so that the step is the least that there is, and the head's share the largest."""
BETWEEN_SIZES = 64
"""Sequences from one CUDA graph to the next."""


class HeadOptions(Options):
    """What is measured."""

    model: Shape = Shape.QWEN3_8B
    """Whose shapes."""
    layers: int | None = None
    """Fewer layers than the published model."""
    mode: Mode = Mode.FP8
    """What else is in FP8."""
    sequences: int = 256
    """Decoded at once."""
    lengths: tuple[int, int] = (64, 320)
    """Tokens of the shorter and of the longer completions."""
    repeats: int = 3
    """Of both lengths."""


async def step_seconds(config: ServiceConfig, options: HeadOptions) -> list[float]:
    """Of a decode step; one figure for each repeat, each of its two runs after one another."""
    prompts = random_prompts([PROMPT] * options.sequences, PUBLISHED)

    async def seconds(name: str, tokens: int) -> float:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        calls = (engine.generate(f"{name}-{i}", tuple(p), sampling) for i, p in enumerate(prompts))
        await asyncio.gather(*calls)
        return time.perf_counter() - started

    short, long = options.lengths
    async with bare_engine(config) as engine:
        await engine.label(0)  # the dummy weights' label is no version
        await seconds("warm-up", short)
        runs = [(await seconds(f"short-{i}", short), await seconds(f"long-{i}", long)) for i in range(options.repeats)]
    return [(of_long - of_short) / (long - short) for of_short, of_long in runs]


def measured(options: HeadOptions) -> Iterator[Json]:
    """A case for each head."""
    for head in HEADS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            engine = {
                "lm_head": head,
                "linear_backend": "cutlass",
                "staging": "none",
                "max_num_seqs": options.sequences,
                "max_model_len": -(-(PROMPT + 8 + max(options.lengths)) // 64) * 64,
                "cuda_graph_sizes": graph_sizes(min(BETWEEN_SIZES, options.sequences), options.sequences),
            }
            path = write_config(options.model, folder / options.model, options.layers)
            config = ServiceConfig.model_validate(settings_of(options.mode, path, folder, engine))
            seconds = asyncio.run(step_seconds(config, options))
        yield {"model": options.model, "lm_head": head, "step_ms": 1e3 * min(seconds), "seconds": seconds}


def main(options: HeadOptions) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/kernels_lm_head.json."""
    cases: list[Json] = []
    asked = options.model_dump(mode="json", include={"layers", "mode", "sequences", "lengths"})
    for case in measured(options):
        added = case["step_ms"] - (cases[0] if cases else case)["step_ms"]
        cases.append(case | {"added_ms": added})
        results.write("kernels_lm_head", {**asked, "prompt_tokens": PROMPT, "cases": cases})
    table = Table("model", "lm_head", "ms a step", "added", title=f"{options.sequences} sequences, {results.machine()}")
    for case in cases:
        table.add_row(case["model"], case["lm_head"], f"{case['step_ms']:.3f}", f"{case['added_ms']:+.3f}")
    Console().print(table)


if __name__ == "__main__":
    run(main)
