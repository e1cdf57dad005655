"""Tokens/s of an engine that reads a group's common prompt once, beside FlashAttention; on a Hopper GPU.

    python -m benchmarks.group_attention --model qwen3-8b
    python -m benchmarks.group_attention --model qwen3-30b-a3b --case 16x16x4096+512

One engine with each ``engine.attention_backend``, ``FLASH_ATTN`` and then ``group``, runs all cases. A case is ``groups
x completions x prompt + output`` in tokens, all at once, temperature 1, no end of sequence; ``1024:`` before it is a
prompt of so many tokens that all groups begin with. Weights are random, of a published shape. A short run comes before
each whole one: two lengths tell what a step takes.
"""

import asyncio
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import EngineOptions, Mode, settings_of
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import Case, Work, random_prompts, take_turns
from benchmarks.rollout.throughput import bare
from rollout_service.config import ServiceConfig

RESULT = "group_attention"
BACKENDS = ("FLASH_ATTN", "group")
SAME = ("model", "mode", "groups", "n", "system_tokens", "prompt_tokens", "output_tokens")
_CASE = re.compile(r"(?:(\d+):)?(\d+)x(\d+)x(\d+)\+(\d+)")


class GroupOptions(Options):
    """What is compared."""

    model: Shape = Shape.QWEN3_8B
    """Whose shapes."""
    case: tuple[str, ...] = (
        *("16x16x4096+512", "16x16x1024+2048", "32x8x4096+1024", "256x1x1024+512", "1024:256x1x256+512"),
    )
    """Groups x completions x prompt + output; may be repeated."""


def sizes_of(case: str) -> dict[str, int]:
    """Return the numbers of a case. Raises ValueError if it is none."""
    found = _CASE.fullmatch(case)
    if found is None:
        raise ValueError(f"--case {case}: give it as 16x16x4096+512, or 1024:16x16x512+512")
    names = ("system_tokens", "groups", "n", "prompt_tokens", "output_tokens")
    return dict(zip(names, (int(number or 0) for number in found.groups()), strict=True))


def work_of(sizes: dict[str, int]) -> Work:
    system, *prompts = random_prompts([sizes["system_tokens"], *[sizes["prompt_tokens"]] * sizes["groups"]])
    return Work([[*system, *prompt] for prompt in prompts], sizes["n"], sizes["output_tokens"])


def engine_of(cases: list[dict[str, int]]) -> dict[str, Any]:
    """Return the settings of an engine that the cases just fit."""
    sequences = max(sizes["groups"] * sizes["n"] for sizes in cases)
    longest = max(sizes["system_tokens"] + sizes["prompt_tokens"] + sizes["output_tokens"] for sizes in cases)
    # a run's mark stands before each prompt
    limits = {"max_model_len": -(-(longest + 8) // 64) * 64, "max_num_seqs": sequences, "staging": "none"}
    return EngineOptions().settings(sequences) | limits


async def measure(
    backend: str, path: Path, options: GroupOptions, engine: dict[str, Any], cases: list[dict[str, int]]
) -> list[Case]:
    """Run all cases on one engine."""
    settings = settings_of(Mode.FP8KV, path, path.parent / backend, engine | {"attention_backend": backend})
    found = [Case(options.model, Mode.FP8KV, backend, None) for _ in cases]
    async with bare(ServiceConfig.model_validate(settings), found) as generate:
        for sizes, case in zip(cases, found, strict=True):
            await take_turns(work_of(sizes), 1, {backend: generate}, {backend: case})
            print(f"{backend} {sizes}: {statistics.median(case.rates):.0f} tokens/s", flush=True)
    return found


def compare(options: GroupOptions, sizes: dict[str, int], group: Case, baseline: Case) -> dict[str, Any]:
    """Return medians of both backends, and their ratios."""
    rate, baseline_rate = (statistics.median(case.rates) for case in (group, baseline))
    step, baseline_step = (statistics.median(case.step_ms) for case in (group, baseline))
    samples = {"baseline": baseline.as_json()["samples"], "group": group.as_json()["samples"]}
    return {
        "model": options.model,
        "mode": Mode.FP8KV,
        **sizes,
        "tokens_per_s": rate,
        "baseline_tokens_per_s": baseline_rate,
        "ratio": rate / baseline_rate,
        "step_ms": step,
        "baseline_step_ms": baseline_step,
        "step_ratio": baseline_step / step,
        "samples": samples,
    }


def main(options: GroupOptions) -> None:
    """Measure, and add each case to benchmarks/results/<machine>/group_attention.json."""
    cases = [sizes_of(case) for case in options.case]
    engine = engine_of(cases)
    with tempfile.TemporaryDirectory() as temporary:
        path = write_config(options.model, Path(temporary) / options.model)
        baseline, group = (asyncio.run(measure(each, path, options, engine, cases)) for each in BACKENDS)
    found = [compare(options, *each) | {"engine": engine} for each in zip(cases, group, baseline, strict=True)]
    results.add(RESULT, found, SAME)


if __name__ == "__main__":
    run(main)
