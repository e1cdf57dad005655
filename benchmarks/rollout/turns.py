"""The sides of ``throughput`` take turns with the same work; what is noted of each turn."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from benchmarks.common.work import Work
from rollout_service.protocol.sampling import Sampling


class Made(Protocol):
    """A completion."""

    @property
    def token_ids(self) -> Sequence[int]:
        """That were sampled."""


Generate = Callable[[list[int], Sampling], Awaitable[Iterable[Made]]]
"""One request: its prompt, and how its completions are sampled."""

SHORT = 8
"""A short run makes one token for so many of a whole run."""


@dataclass(frozen=True)
class Sample:
    """One whole run and a short one before it."""

    seconds: float
    short_s: float
    tokens: int
    """Of each completion of the whole run."""

    @property
    def step_ms(self) -> float:
        """What each further token of all completions takes."""
        return 1e3 * (self.seconds - self.short_s) / (self.tokens - self.tokens // SHORT)

    @property
    def fixed_s(self) -> float:
        """What is left of the whole run: submitting, prefill, and answers."""
        return self.seconds - 1e-3 * self.step_ms * self.tokens


@dataclass
class Case:
    """One side of one mode."""

    model: str
    mode: str
    side: str
    envelope_gb: float | None
    start_s: float = 0.0
    """Until the engine, or the service, takes requests."""
    rates: list[float] = field(default_factory=list)
    """Tokens/s of each whole run."""
    samples: list[Sample] = field(default_factory=list)
    kv_tokens: int | None = None
    """What the KV cache holds."""

    def add(self, sample: Sample, tokens: int) -> None:
        """``tokens``: of all completions."""
        self.samples.append(sample)
        self.rates.append(tokens / sample.seconds)

    def as_json(self) -> dict[str, Any]:
        """With medians."""
        medians = {"tokens_per_s": self.rates, "step_ms": self.step_ms, "fixed_s": self.fixed_s}
        return asdict(self) | {name: statistics.median(values) if values else None for name, values in medians.items()}

    @property
    def step_ms(self) -> list[float]:
        """Of each sample."""
        return [sample.step_ms for sample in self.samples]

    @property
    def fixed_s(self) -> list[float]:
        """Of each sample."""
        return [sample.fixed_s for sample in self.samples]


async def take_turns(work: Work, repeats: int, sides: Mapping[str, Generate], cases: Mapping[str, Case]) -> None:
    """All sides in turn, again and again, so that what drifts on a host drifts for all; a first turn is not noted.

    A whole run of many minutes is not repeated for that: with one repeat, only short runs come before.
    """
    for repeat in range(-1 if repeats > 1 else 0, repeats):
        for number, (name, generate) in enumerate(sides.items()):
            sample = await sampled(work, generate, f"{number}{repeat + 1}")
            if repeat >= 0:
                cases[name].add(sample, work.tokens)


async def sampled(work: Work, generate: Generate, mark: str) -> Sample:
    """A short run, then a whole one. ``mark``: up to four digits; no two turns of an engine may have the same."""
    short_s = await _run(replace(work, out=max(1, work.out // SHORT)), generate, f"{mark}0")
    return Sample(await _run(work, generate, f"{mark}1"), short_s, work.out)


async def _run(work: Work, generate: Generate, mark: str) -> float:
    """Seconds. ``mark``: first tokens, so that no prompt is in the prefix cache from a time or a side before.

    Raises RuntimeError if fewer tokens were made than were asked for: those of an engine that is shut down meanwhile
    would count as made in no time.
    """
    started = time.perf_counter()
    prompts = [[*map(int, f"{mark:0>5}"), *prompt] for prompt in work.prompts]
    answers = await asyncio.gather(*(generate(prompt, work.sampling) for prompt in prompts))
    seconds = time.perf_counter() - started
    made = sum(len(completion.token_ids) for completions in answers for completion in completions)
    if made != work.tokens:
        raise RuntimeError(f"{made} tokens were made, and not {work.tokens}")
    return seconds
