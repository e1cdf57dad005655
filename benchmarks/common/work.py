"""What engines and services are asked for, all at once; and sides that take turns with the same work."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.common.command import Options
from benchmarks.common.results import Json
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling

PUBLISHED, TINY = range(1000, 150_000), range(5, 95)  # token ids that the published shapes have, and the tiny model


@dataclass(frozen=True)
class Work:
    """``n`` completions of ``out`` tokens of each prompt."""

    prompts: list[list[int]]
    n: int
    out: int

    @property
    def sampling(self) -> Sampling:
        """Return how each prompt's completions are sampled: temperature 1, no end of sequence."""
        return Sampling(n=self.n, max_tokens=self.out, ignore_eos=True)

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.n * self.out


class WorkOptions(Options):
    """The work."""

    groups: int = 16
    """Distinct prompts."""
    n: int = 16
    """Completions of each prompt."""
    prompt_min: int = 512
    """Tokens of the shortest prompt."""
    prompt_max: int = 512
    """Tokens of the longest prompt; lengths are spread evenly between them."""
    out: int = 512
    """Tokens of a completion."""

    @property
    def sequences(self) -> int:
        return self.groups * self.n

    def make(self, seed: int = 0) -> Work:
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.groups).int().tolist()
        return Work(random_prompts(lengths, seed), self.n, self.out)

    def as_json(self) -> Json:
        prompt_tokens = [self.prompt_min, self.prompt_max]
        return {"groups": self.groups, "n": self.n, "prompt_tokens": prompt_tokens, "output_tokens": self.out}


def random_prompts(lengths: list[int], seed: int = 0, token_ids: range = PUBLISHED) -> list[list[int]]:
    """Return one prompt of each length, always the same of a seed."""
    generator = torch.Generator().manual_seed(seed)
    bounds = token_ids.start, token_ids.stop
    return [torch.randint(*bounds, (length,), generator=generator).tolist() for length in lengths]


Generate = Callable[[list[int], Sampling], Awaitable[Iterable[Completion]]]
"""One request: its prompt, and how its completions are sampled."""

SHORT = 8  # a short run makes one token for so many of a whole run


@dataclass(frozen=True)
class Sample:
    """One whole run and a short one before it."""

    seconds: float
    short_s: float
    tokens: int  # of each completion of the whole run

    @property
    def step_ms(self) -> float:
        return 1e3 * (self.seconds - self.short_s) / (self.tokens - self.tokens // SHORT)


@dataclass
class Case:
    """One side of one mode."""

    model: str
    mode: str
    side: str
    envelope_gb: float | None
    start_s: float = 0.0  # until the engine, or the service, takes requests
    rates: list[float] = field(default_factory=list)  # tokens/s of each whole run
    samples: list[Sample] = field(default_factory=list)
    kv_tokens: int | None = None  # what the KV cache holds

    def as_json(self) -> dict[str, Any]:
        medians = {"tokens_per_s": self.rates, "step_ms": self.step_ms}
        return asdict(self) | {name: statistics.median(values) if values else None for name, values in medians.items()}

    @property
    def step_ms(self) -> list[float]:
        return [sample.step_ms for sample in self.samples]


async def take_turns(work: Work, repeats: int, sides: Mapping[str, Generate], cases: Mapping[str, Case]) -> None:
    """Let all sides take turns, so that what drifts on a host drifts for all; a first turn is not noted."""
    # a whole run of many minutes is not repeated for that: with one repeat, only short runs come before
    for repeat in range(-1 if repeats > 1 else 0, repeats):
        for number, (name, generate) in enumerate(sides.items()):
            sample = await sampled(work, generate, f"{number}{repeat + 1}")
            if repeat >= 0:
                cases[name].samples.append(sample)
                cases[name].rates.append(work.tokens / sample.seconds)


async def sampled(work: Work, generate: Generate, mark: str) -> Sample:
    """Make a short run, then a whole one. ``mark``: up to four digits; no two turns of an engine may have the same."""
    short_s = await _run(replace(work, out=max(1, work.out // SHORT)), generate, f"{mark}0")
    return Sample(await _run(work, generate, f"{mark}1"), short_s, work.out)


async def _run(work: Work, generate: Generate, mark: str) -> float:
    """Return the seconds. ``mark``: first tokens, so that no prompt is in the prefix cache from a turn before."""
    started = time.perf_counter()
    prompts = [[*map(int, f"{mark:0>5}"), *prompt] for prompt in work.prompts]
    answers = await asyncio.gather(*(generate(prompt, work.sampling) for prompt in prompts))
    seconds = time.perf_counter() - started
    made = sum(len(completion.token_ids) for completions in answers for completion in completions)
    if made != work.tokens:
        raise RuntimeError(f"{made} tokens were made, and not {work.tokens}")
    return seconds
