"""What every side of ``benchmarks.rollout.throughput`` is asked to do, and what is noted of it."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.common.machine_watch import GpuWatch, cpu_seconds, gpu_watch
from rollout_service.protocol.sampling import Sampling

Generate = Callable[[list[int], Sampling], Awaitable[object]]
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
    cores: dict[str, float]
    """How many CPU cores each kind of process kept busy in the whole run."""
    gpu: dict[str, float]
    """Medians in the whole run: ``sm_mhz``, ``power_w``."""

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


@dataclass(frozen=True)
class Work:
    """The prompts, ``sampling.n`` completions of each, all at once, so many times."""

    prompts: list[list[int]]
    sampling: Sampling
    repeats: int

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return len(self.prompts) * self.sampling.n * self.sampling.max_tokens

    @property
    def short(self) -> Sampling:
        """Of the short runs."""
        return self.sampling.model_copy(update={"max_tokens": max(1, self.sampling.max_tokens // SHORT)})

    async def measure(self, sides: Mapping[str, Generate], cases: Mapping[str, Case]) -> None:
        """All sides in turn, again and again, so that what drifts on a host drifts for all; a first turn is not noted.

        A whole run of many minutes is not repeated for that: with one repeat, only short runs come before.
        """
        with gpu_watch() as watch:
            for repeat in range(-1 if self.repeats > 1 else 0, self.repeats):
                for number, (name, generate) in enumerate(sides.items()):
                    sample = await self._sample(generate, f"{number}{repeat + 1}", watch)
                    if repeat >= 0:
                        cases[name].add(sample, self.tokens)

    async def _sample(self, generate: Generate, mark: str, watch: GpuWatch) -> Sample:
        short_s = await self._run(generate, self.short, f"{mark}0")
        before, _ = cpu_seconds(), watch.take()
        seconds = await self._run(generate, self.sampling, f"{mark}1")
        cores = {name: spent / seconds for name, spent in (cpu_seconds() - before).items()}
        return Sample(seconds, short_s, self.sampling.max_tokens, cores, watch.take())

    async def _run(self, generate: Generate, sampling: Sampling, mark: str) -> float:
        """Seconds. ``mark``: first tokens, so that no prompt is in the prefix cache from a time or a side before."""
        started = time.perf_counter()
        prompts = [[*map(int, f"{mark:0>5}"), *prompt] for prompt in self.prompts]
        await asyncio.gather(*(generate(prompt, sampling) for prompt in prompts))
        return time.perf_counter() - started


def make_work(groups: int, n: int, prompt: tuple[int, int], out: int, repeats: int) -> Work:
    """Distinct prompts of random tokens, their lengths spread evenly over the range."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*prompt, groups).int().tolist()
    prompts = [torch.randint(1000, 150_000, (length,), generator=generator).tolist() for length in lengths]
    return Work(prompts, Sampling(n=n, max_tokens=out, ignore_eos=True), repeats)
