"""Tokens/s of an engine that reads a group's common prompt once, against one that does not; on a Hopper GPU.

    python -m benchmarks.group_attention --model qwen3-8b --limit-s 540
    python -m benchmarks.group_attention --model qwen3-30b-a3b --case 16x16x4096+512 --after

Both are engines of the service's own configuration, with random weights of a published shape; all that differs is
``engine.attention_backend``: ``group`` and ``FLASH_ATTN``. A case is ``groups x completions x prompt + output`` in
tokens, all at once, temperature 1, no end of sequence, nothing of it in the prefix cache before; ``1024:`` before it
is a prompt of so many tokens that all groups begin with. A short run, with an eighth of the tokens, comes before each
whole one: two lengths tell what a step takes. The two engines live beside each other and take turns; where memory
does not hold both, or with ``--after``, one comes after the other with all its cases. Each case is written as soon as
both have run it. No run is begun that would not end before ``--limit-s``, by what the one before it took,
and one that is not over by then is given up.
"""

import asyncio
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import ENGINES_SHARE, Mode, graph_sizes, settings_of
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import PUBLISHED, Work, random_prompts
from benchmarks.rollout.throughput import bare
from benchmarks.rollout.turns import Case as Turns
from benchmarks.rollout.turns import Generate, take_turns
from rollout_service.config import ServiceConfig
from rollout_service.model.served_model import ServedModel

RESULT = "group_attention"
SIDES = {"baseline": "FLASH_ATTN", "group": "group"}
"""Side → ``engine.attention_backend``."""
SAME = ("model", "mode", "layers", "groups", "n", "system_tokens", "prompt_tokens", "output_tokens")
_CASE = re.compile(r"(?:(\d+):)?(\d+)x(\d+)x(\d+)\+(\d+)")
_KV_MARGIN = 1.1
"""Pages that are not full, and those of a run before that were not taken yet."""
_BESIDES_WEIGHTS_GB = 8
"""What an engine takes beside weights and KV cache: activations, CUDA graphs, libraries."""


@dataclass(frozen=True)
class Asked:
    """One kind of work."""

    groups: int
    n: int
    prompt_tokens: int
    output_tokens: int
    system_tokens: int = 0
    """What all prompts begin with; beside ``prompt_tokens``."""

    @property
    def sequences(self) -> int:
        """All at once."""
        return self.groups * self.n

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.system_tokens + self.prompt_tokens + self.output_tokens

    @property
    def kv_tokens(self) -> int:
        """That the KV cache must hold."""
        return self.system_tokens + self.groups * self.prompt_tokens + self.sequences * self.output_tokens

    def work(self) -> Work:
        """Prompts of random tokens."""
        system, *prompts = random_prompts([self.system_tokens, *[self.prompt_tokens] * self.groups], PUBLISHED)
        return Work([[*system, *prompt] for prompt in prompts], self.n, self.output_tokens)

    def __str__(self) -> str:
        system = f"{self.system_tokens}:" if self.system_tokens else ""
        return f"{system}{self.groups}x{self.n}x{self.prompt_tokens}+{self.output_tokens}"


def asked(text: str) -> Asked:
    """The work that an option names. Raises ValueError if it names none."""
    found = _CASE.fullmatch(text)
    if found is None:
        raise ValueError(f"--case {text}: give it as 16x16x4096+512, or 1024:16x16x512+512")
    system, *sizes = (int(number or 0) for number in found.groups())
    groups, n, prompt, out = sizes
    return Asked(groups, n, prompt, out, system)


class ShapeOptions(Options):
    """The model and the engines."""

    model: Shape = Shape.QWEN3_8B
    """Whose shapes."""
    layers: int | None = None
    """Fewer layers than the published model."""
    folder: Path = SHARED_MEMORY
    """Where its config.json is put."""
    linear: str = "cutlass"
    """vLLM's linear_backend for FP8."""
    block_size: int = 64
    """Tokens of a page of the KV cache."""
    batched_tokens: int = 8192
    """Tokens of a step."""
    graph_step: int = 32
    """CUDA graphs for multiples of it, and for small powers of two."""

    def settings(self, work: list[Asked]) -> dict[str, Any]:
        """Of an engine that the work just fits, in the service's terms."""
        sequences = max(each.sequences for each in work)
        longest = max(each.longest for each in work) + 8  # a run's mark stands before each prompt
        return {
            "linear_backend": self.linear,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.batched_tokens,
            "cuda_graph_sizes": graph_sizes(self.graph_step, sequences),
            "max_model_len": -(-longest // 64) * 64,
            "max_num_seqs": sequences,
            "staging": "none",
        }


class GroupOptions(Options):
    """What is compared."""

    mode: Mode = Mode.FP8KV
    """What is in FP8: bf16, fp8 (weights) or fp8kv (weights and KV cache)."""
    case: tuple[str, ...] = (
        *("16x16x4096+512", "16x16x1024+2048", "32x8x4096+1024", "256x1x1024+512", "1024:256x1x256+512"),
    )
    """Groups x completions x prompt + output; may be repeated. The first are run first."""
    repeats: int = 1
    """Whole runs of each side and case; with more than one, one before them is not counted."""
    after: bool = False
    """One engine after the other, even where memory would hold both."""
    limit_s: float = 540.0
    """The whole command is to end by then."""


@dataclass
class Pair:
    """Both sides of one case."""

    asked: Asked
    turns: dict[str, Turns]
    seconds: float = 0.0
    """That the last of its runs took, short run included."""

    @property
    def is_whole(self) -> bool:
        """Whether both sides have run."""
        return all(turn.rates for turn in self.turns.values())

    def as_json(self) -> dict[str, Any]:
        """Medians, and all that they are of."""
        rate, baseline_rate = (statistics.median(self.turns[side].rates) for side in ("group", "baseline"))
        step, baseline_step = (statistics.median(self.turns[side].step_ms) for side in ("group", "baseline"))
        return {
            "model": self.turns["group"].model,
            "mode": self.turns["group"].mode,
            "groups": self.asked.groups,
            "n": self.asked.n,
            "system_tokens": self.asked.system_tokens,
            "prompt_tokens": self.asked.prompt_tokens,
            "output_tokens": self.asked.output_tokens,
            "tokens_per_s": rate,
            "baseline_tokens_per_s": baseline_rate,
            "ratio": rate / baseline_rate,
            "step_ms": step,
            "baseline_step_ms": baseline_step,
            "step_ratio": baseline_step / step,
            "kv_tokens": self.turns["group"].kv_tokens,
            "samples": {side: self.turns[side].as_json()["samples"] for side in SIDES},
        }


@dataclass
class Comparison:
    """All cases of one model and mode, and the time that is left for them."""

    options: GroupOptions
    pairs: list[Pair]
    common: dict[str, Any]
    """What else each case says."""
    until: float
    """By ``clock``."""
    console: Console
    clock: Callable[[], float] = time.monotonic
    """In seconds."""
    written: list[dict[str, Any]] = field(default_factory=list)

    async def beside(self, configs: dict[str, ServiceConfig]) -> None:
        """Both engines at once, which take turns."""
        async with AsyncExitStack() as stack:
            sides = {side: await self._started(stack, side, config) for side, config in configs.items()}
            for pair in self.affordable(len(sides)):
                await self._run(pair, sides)

    async def one_after_the_other(self, configs: dict[str, ServiceConfig]) -> None:
        """Each engine alone, with all its cases."""
        for number, (side, config) in enumerate(configs.items()):
            async with AsyncExitStack() as stack:
                generate = await self._started(stack, side, config)
                share = self.until if number else self.clock() + (self.until - self.clock()) * 0.6
                for pair in self.affordable(1, share):
                    if number == 0 or pair.turns["baseline"].rates:
                        await self._run(pair, {side: generate})

    async def _started(self, stack: AsyncExitStack, side: str, config: ServiceConfig) -> Generate:
        first = self.pairs[0].turns[side]
        generate = await stack.enter_async_context(bare(config, first))
        for pair in self.pairs:
            pair.turns[side].start_s, pair.turns[side].kv_tokens = first.start_s, first.kv_tokens
        self.console.print(f"{side}: started in {first.start_s:.0f} s, {first.kv_tokens} tokens of KV cache")
        return generate

    def affordable(self, sides: int, until: float | None = None) -> Iterator[Pair]:
        """Cases whose runs will likely end in time: as long for each token as the slowest so far."""
        until, per_token = until or self.until, 0.0
        for pair in self.pairs:
            tokens = pair.asked.sequences * pair.asked.output_tokens
            runs = sides * (self.options.repeats + (self.options.repeats > 1))
            if self.clock() + per_token * tokens * runs > until:
                self.console.print(f"no time left for {pair.asked}")
                continue
            yield pair
            per_token = max(per_token, pair.seconds / (tokens * runs))

    async def _run(self, pair: Pair, sides: dict[str, Generate]) -> None:
        started = self.clock()
        left = asyncio.timeout(max(0.0, self.until - started))
        try:
            async with left:
                await take_turns(pair.asked.work(), self.options.repeats, sides, pair.turns)
        except TimeoutError:
            if not left.expired():
                raise
            self.console.print(f"{pair.asked}: given up, --limit-s is over")
            return
        pair.seconds = self.clock() - started
        for side in sides:
            rate, step = statistics.median(pair.turns[side].rates), statistics.median(pair.turns[side].step_ms)
            self.console.print(f"{pair.asked} {side}: {rate:.0f} tokens/s, {step:.2f} ms a step")
        if pair.is_whole:
            self._keep(pair)

    def _keep(self, pair: Pair) -> None:
        case = pair.as_json() | self.common
        self.written.append(case)
        self.console.print(f"{pair.asked}: {case['ratio']:.3f} of the tokens/s, steps {case['step_ratio']:.3f}")
        results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [case], SAME)})


def fits_twice(path: Path, mode: Mode, work: list[Asked], total_bytes: int) -> bool:
    """Whether two engines of the model have room beside each other, with the KV cache that the work needs."""
    cache = kv_cache_bytes(path, mode, work)
    return 2 * engine_bytes(path, mode, cache) <= ENGINES_SHARE * total_bytes


def engine_bytes(path: Path, mode: Mode, cache: float) -> float:
    """Of the GPU's memory, roughly, for an engine with a KV cache of so many."""
    model = ServedModel.load(path)
    weights = sum(map(math.prod, model.shapes.values())) * (2 if mode == Mode.BF16 else 1.1)
    return weights + cache + _BESIDES_WEIGHTS_GB * 1e9


def kv_cache_bytes(path: Path, mode: Mode, work: Iterable[Asked]) -> int:
    """What any of the work needs of a GPU's memory."""
    return math.ceil(_KV_MARGIN * max(each.kv_tokens for each in work) * kv_token_bytes(path, mode))


def kv_token_bytes(path: Path, mode: Mode) -> int:
    """Of a token in the KV cache, all layers."""
    shape = json.loads((path / "config.json").read_text())
    per_token: int = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return per_token * (1 if mode == Mode.FP8KV else 2)


def configurations(path: Path, mode: Mode, engine: dict[str, Any], share: float) -> dict[str, ServiceConfig]:
    """Of each side; ``share``: of the GPU's memory."""
    engine = engine | {"gpu_memory_utilization": round(share, 4)}
    return {
        side: ServiceConfig.model_validate(
            settings_of(mode, path, path.parent / side, engine | {"attention_backend": backend})
        )
        for side, backend in SIDES.items()
    }


def table_of(cases: list[dict[str, Any]]) -> Table:
    """For people."""
    table = Table(title=f"a group's prompt read once, on {results.machine()}")
    for column in ("model", "mode", "groups", "n", "prompt", "output"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    for column in ("tokens/s", "baseline", "ratio", "step, ms", "baseline", "ratio"):
        table.add_column(column, justify="right")
    for c in cases:
        prompt = f"{c['system_tokens']} + {c['prompt_tokens']}" if c["system_tokens"] else str(c["prompt_tokens"])
        rates = (f"{c['tokens_per_s']:.0f}", f"{c['baseline_tokens_per_s']:.0f}", f"{c['ratio']:.2f}")
        steps = (f"{c['step_ms']:.2f}", f"{c['baseline_step_ms']:.2f}", f"{c['step_ratio']:.2f}")
        sizes = (str(c["groups"]), str(c["n"]), prompt, str(c["output_tokens"]))
        table.add_row(c["model"], c["mode"], *sizes, *rates, *steps)
    return table


def main(shape: ShapeOptions, options: GroupOptions) -> None:
    """Measure, print the table, and add each case to benchmarks/results/<machine>/group_attention.json."""
    until = time.monotonic() + options.limit_s
    work = [asked(each) for each in options.case]
    with tempfile.TemporaryDirectory(dir=shape.folder) as temporary:
        path = write_config(shape.model, Path(temporary) / shape.model, shape.layers)
        total: int = torch.cuda.get_device_properties(0).total_memory
        beside = not options.after and fits_twice(path, options.mode, work, total)
        engine, share = shape.settings(work), ENGINES_SHARE
        if beside:  # nothing is measured, so neither depends on what else is on the GPU meanwhile
            cache = kv_cache_bytes(path, options.mode, work)
            engine["extra"] = {"kv_cache_memory_bytes": cache}
            share = engine_bytes(path, options.mode, cache) / total
        configs = configurations(path, options.mode, engine, share)
        pairs = [Pair(each, {side: Turns(shape.model, options.mode, side, None) for side in SIDES}) for each in work]
        common = {"layers": shape.layers, "beside": beside, "engine": engine}
        comparison = Comparison(options, pairs, common, until, Console())
        way = comparison.beside if beside else comparison.one_after_the_other
        asyncio.run(way(configs))
    comparison.console.print(table_of(comparison.written))
    comparison.console.print(f"added to {results.path(RESULT)}")


if __name__ == "__main__":
    run(main)
