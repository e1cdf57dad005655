"""How the lengths of completions change when an update aborts what runs at every step of the trainer.

    python -m benchmarks.rollout.length_bias [--completions 2000] [--cases undisturbed,continued]

One engine of the small model with random weights, which samples all tokens about equally often; 3 of its 128 end a
completion, so that lengths are geometric, about 43 tokens on average, whatever the completion is. ``--at-once`` prompts
run at any time. Whenever half as many have finished, a step is over, and everything that runs is aborted. What becomes
of it:

- ``undisturbed``: nothing is aborted;
- ``continued``: the gateway's dispatcher goes on from the tokens so far;
- ``continued_stop_strings``: likewise, with stop strings in place of stop tokens, which end completions as often;
- ``continued_penalties``: likewise, with a presence penalty of 1e-6, which changes no probability that could be seen,
  so that the lengths should stay the same;
- ``restarted``: it starts anew from the prompt, as it does for requests with such a penalty where engines return
  sampling masks. ``engine.max_attempts`` is as large as it takes;
- ``restarted_3_attempts``: likewise, with the default limit: then the partial completion comes back as ``abort``;
- ``dropped``: ``on_abort="return"``, and the trainer drops what was aborted.

Each case's lengths are held against the undisturbed ones by the Kolmogorov–Smirnov test of two samples: the largest
difference of their distribution functions, and how likely one as large is if they are the same distribution (its
asymptotic formula, which says too much rather than too little for lengths, which are whole numbers).
"""

import asyncio
import itertools
import math
import statistics
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from rollout_service.config import ServiceConfig
from rollout_service.config.engine import EngineConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.model.tiny import VOCABULARY, make_tiny_qwen3
from rollout_service.protocol.progress import ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.rpc import IngestCalls
from rollout_service.store.log import WeightLog

STOPS = (64, 65, 66)
"""Of 128 tokens."""
BINS = (0, 10, 20, 40, 80, 160, 321)
LONGEST = 320
ENDLESS = 10_000
UNSEEN_PENALTY = 1e-6


@dataclass(frozen=True)
class Treatment:
    """What becomes of the completions that an update aborts."""

    name: str
    restarts: bool = False
    """They start anew from the prompt."""
    max_attempts: int = ENDLESS
    on_abort: OnAbort = "continue"
    aborts: bool = True
    """Whether updates abort at all."""
    stop_strings: bool = False
    """In place of stop tokens."""
    penalty: bool = False
    """Requests have one."""


TREATMENTS = (
    Treatment("undisturbed", aborts=False),
    Treatment("continued"),
    Treatment("continued_stop_strings", stop_strings=True),
    Treatment("continued_penalties", penalty=True),
    Treatment("restarted", restarts=True, penalty=True),
    Treatment("restarted_3_attempts", restarts=True, penalty=True, max_attempts=EngineConfig().max_attempts),
    Treatment("dropped", on_abort="return"),
)


class LoadOptions(Options):
    """The trainer."""

    completions: int = 2000
    """That it gets in each case."""
    at_once: int = 64
    """Prompts that run at any time."""

    @property
    def in_a_step(self) -> int:
        """Completions after which a step is over."""
        return self.at_once // 2


@dataclass(frozen=True)
class Case:
    """What became of the completions that a trainer gets."""

    case: str
    completions: int
    dropped: int
    truncated: int
    """Ended by an abort, and delivered."""
    mean_tokens: float
    median_tokens: float
    histogram: dict[str, float]
    """Share of the completions by tokens, [from, to)."""
    aborts: int
    sampled_tokens: int
    """By the engine, those that were thrown away included."""
    delivered_tokens: int
    ks_statistic: float = 0.0
    """Against the undisturbed case."""
    ks_p: float = 1.0


@dataclass
class OneEngine:
    """What a replica does with a call, without Serve."""

    adapter: EngineAdapter
    sampled_tokens: int = 0

    async def generate(self, call: GenerateCall) -> Rollout:
        """See ``EngineReplica.generate``."""
        completions = await self.adapter.generate(
            call.request_id, call.prompt_token_ids, call.sampling, partial_tokens=call.partial_tokens
        )
        self.sampled_tokens += sum(len(completion.token_ids) for completion in completions)
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id="only",
        )

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        """Nobody asks: a question goes to replicas that a router has chosen."""
        raise NotImplementedError


class Trainer:
    """Asks for completions, and updates the engine whenever a step is over."""

    def __init__(self, adapter: EngineAdapter, treatment: Treatment, options: LoadOptions) -> None:
        self._adapter, self._treatment, self._options = adapter, treatment, options
        self._engine = OneEngine(adapter)
        limits = EngineConfig(max_attempts=treatment.max_attempts, return_sampling_mask=treatment.restarts)
        self._dispatcher = Dispatcher(self._engine, cast(IngestCalls, None), limits, _decode)
        self._sampling = Sampling(
            max_tokens=LONGEST,
            ignore_eos=True,
            stop_token_ids=() if treatment.stop_strings else STOPS,
            stop=tuple(VOCABULARY[token] for token in STOPS) if treatment.stop_strings else (),
            presence_penalty=UNSEEN_PENALTY if treatment.penalty else 0.0,
        )
        self._numbers = itertools.count(1)
        self._step_over = asyncio.Event()
        self.lengths: list[int] = []
        """Tokens of the completions that it got."""
        self._in_step = self._aborts = self._dropped = self._truncated = 0

    async def run(self) -> Case:
        """Until it has all its completions."""
        updating = asyncio.create_task(self._update()) if self._treatment.aborts else None
        await asyncio.gather(*(self._ask() for _ in range(self._options.at_once)))
        if updating is not None:
            updating.cancel()
        return Case(
            case=self._treatment.name,
            completions=len(self.lengths),
            dropped=self._dropped,
            truncated=self._truncated,
            mean_tokens=round(statistics.mean(self.lengths), 2),
            median_tokens=statistics.median(self.lengths),
            histogram=_histogram(self.lengths),
            aborts=self._aborts,
            sampled_tokens=self._engine.sampled_tokens,
            delivered_tokens=sum(self.lengths),
        )

    async def _ask(self) -> None:
        """One prompt after the other."""
        while len(self.lengths) < self._options.completions:
            name = f"{self._treatment.name}-{next(self._numbers)}"
            call = GenerateCall(request_id=name, prompt_token_ids=(5, 6), sampling=self._sampling)
            (completion,) = (await self._dispatcher.complete(call, self._treatment.on_abort)).completions
            aborted = completion.finish_reason == "abort"
            if aborted and self._treatment.on_abort == "return":
                self._dropped += 1
                continue
            self._truncated += aborted
            self.lengths.append(len(completion.token_ids))
            self._in_step += 1
            if self._in_step >= self._options.in_a_step:
                self._step_over.set()

    async def _update(self) -> None:
        """Abort what runs after every step."""
        while True:
            await self._step_over.wait()
            self._step_over.clear()
            self._in_step = 0
            self._aborts += 1
            await self._adapter.pause("abort")
            await self._adapter.resume()


def _histogram(lengths: list[int]) -> dict[str, float]:
    pairs = itertools.pairwise(BINS)
    return {f"{low}-{high}": round(sum(low <= n < high for n in lengths) / len(lengths), 4) for low, high in pairs}


def _decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """A character a token, as the small model's tokenizer has it."""
    return "".join(VOCABULARY[token] for token in token_ids)


def kolmogorov_smirnov(first: Sequence[int], second: Sequence[int]) -> tuple[float, float]:
    """Largest difference of the two samples' distribution functions, and its p-value by the asymptotic formula."""
    one, other = sorted(first), sorted(second)
    n, m = len(one), len(other)
    largest = max(abs(bisect_right(one, x) / n - bisect_right(other, x) / m) for x in {*one, *other})
    at = largest * math.sqrt(n * m / (n + m))
    if at < 0.2:  # the series below needs many terms there, and is 1
        return largest, 1.0
    p = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * at) ** 2) for k in range(1, 101))
    return largest, min(1.0, max(0.0, p))


async def measure(options: LoadOptions, treatments: Sequence[Treatment] = TREATMENTS) -> list[Case]:
    """Every case, on one engine; the first is what the others are held against."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_qwen3(Path(folder) / "model")
        config = ServiceConfig.model_validate(
            {
                "model": {"path": Path(folder) / "model"},
                "engine": {"max_model_len": 2 * LONGEST, "max_num_seqs": options.at_once},
                "kv_cache": {"dtype": "fp8_e4m3"},
                "weights": {"root": Path(folder) / "log"},
            }
        )
        version = await commit(config)
        async with bare_engine(config, has_tokenizer=True) as adapter:
            await load_version(adapter, WeightLog(config.weights.root).folder(version), version)
            found = list[tuple[Case, list[int]]]()
            for treatment in treatments:
                trainer = Trainer(adapter, treatment, options)
                found.append((await trainer.run(), trainer.lengths))
    against = found[0][1]
    return [_held_against(case, kolmogorov_smirnov(against, lengths)) for case, lengths in found]


def _held_against(case: Case, ks: tuple[float, float]) -> Case:
    return replace(case, ks_statistic=round(ks[0], 4), ks_p=round(ks[1], 4))


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table("", "mean", "median", *cases[0].histogram, "truncated", "dropped", "sampled / delivered", "KS p")
    for c in cases:
        shares = [f"{share:.1%}" for share in c.histogram.values()]
        wasted = f"{c.sampled_tokens / c.delivered_tokens:.2f}"
        table.add_row(
            c.case,
            f"{c.mean_tokens:.1f}",
            f"{c.median_tokens:g}",
            *shares,
            f"{c.truncated}",
            f"{c.dropped}",
            wasted,
            f"{c.ks_p:.3f}",
        )
    return table


def main(options: LoadOptions, cases: str = "") -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/rollout_length_bias.json.

    ``cases``: names with commas between, ``undisturbed`` first; empty: all. Those of before stay for the others.
    """
    treatments = [t for t in TREATMENTS if not cases or t.name in cases.split(",")]
    made = asyncio.run(measure(options, treatments))
    console = Console()
    console.print(table_of(made))
    shape = {"at_once": options.at_once, "completions_in_a_step": options.in_a_step}
    all_cases = results.joined(results.cases("rollout_length_bias"), map(asdict, made), same=["case"])
    console.print(f"wrote {results.write('rollout_length_bias', shape | {'cases': all_cases})}")


if __name__ == "__main__":
    run(main)
