"""How the lengths of completions change when an update aborts what runs at every step of the trainer.

    python -m benchmarks.rollout.length_bias [--completions 1200]

One engine of the small model with random weights, which samples all tokens about equally often; 3 of its 128 end a
completion, so that lengths are geometric, about 43 tokens on average, whatever the completion is. ``--at-once`` prompts
run at any time. Whenever half as many have finished, a step is over, and everything that runs is aborted. What becomes
of it:

- ``undisturbed``: nothing is aborted;
- ``continued``: the gateway's dispatcher goes on from the tokens so far;
- ``restarted``: it starts anew from the prompt, as it does for requests with stop strings or penalties (here one of
  1e-6, which changes no probability that could be seen), and as it does for those whose replica died.
  ``engine.max_attempts`` is as large as it takes;
- ``restarted_3_attempts``: likewise, with the default limit: then the partial completion comes back as ``abort``;
- ``dropped``: ``on_abort="return"``, and the trainer drops what was aborted.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.mismatch.logprobs import commit, engine
from rollout_service.config import ServiceConfig
from rollout_service.config.engine import EngineConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling

STOPS = (64, 65, 66)
"""Of 128 tokens."""
BINS = (0, 10, 20, 40, 80, 160, 321)
LONGEST = 320
ENDLESS = 10_000
UNSEEN_PENALTY = 1e-6


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


@dataclass
class EngineHandle:
    """An engine behind the face of a Serve handle."""

    adapter: EngineAdapter
    sampled_tokens: int = 0

    @property
    def generate(self) -> "EngineHandle":
        """The only method."""
        return self

    def remote(self, call: GenerateCall) -> Awaitable[Rollout]:
        """Start a generation."""
        return asyncio.ensure_future(self._generate(call))

    async def _generate(self, call: GenerateCall) -> Rollout:
        completions = await self.adapter.generate(call.request_id, call.prompt_token_ids, call.sampling)
        self.sampled_tokens += sum(len(completion.token_ids) for completion in completions)
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id="only",
        )


async def measure(
    name: str, adapter: EngineAdapter, wanted: int, at_once: int, *, restarts: bool, aborts: bool = True,
    max_attempts: int = ENDLESS, on_abort: OnAbort = "continue",
) -> Case:  # fmt: skip
    """One case, until the trainer has ``wanted`` completions."""
    handle = EngineHandle(adapter)
    dispatcher = Dispatcher(handle, None, EngineConfig(max_attempts=max_attempts))
    sampling = Sampling(
        max_tokens=LONGEST, ignore_eos=True, stop_token_ids=STOPS,
        presence_penalty=UNSEEN_PENALTY if restarts else 0.0,
    )  # fmt: skip
    lengths: list[int] = []
    counts = {"number": 0, "dropped": 0, "truncated": 0, "in_step": 0, "aborts": 0}
    step_over = asyncio.Event()

    async def caller() -> None:
        while len(lengths) < wanted:
            counts["number"] += 1
            call = GenerateCall(request_id=f"{name}-{counts['number']}", prompt_token_ids=(5, 6), sampling=sampling)
            (completion,) = (await dispatcher.complete(call, on_abort)).completions
            aborted = completion.finish_reason == "abort"
            if aborted and on_abort == "return":
                counts["dropped"] += 1
                continue
            counts["truncated"] += aborted
            lengths.append(len(completion.token_ids))
            counts["in_step"] += 1
            if counts["in_step"] >= at_once // 2:
                step_over.set()

    async def update() -> None:
        while True:
            await step_over.wait()
            step_over.clear()
            counts["in_step"] = 0
            counts["aborts"] += 1
            await adapter.pause("abort")
            await adapter.resume()

    updating = asyncio.create_task(update()) if aborts else None
    await asyncio.gather(*(caller() for _ in range(at_once)))
    if updating is not None:
        updating.cancel()
    return Case(
        case=name,
        completions=len(lengths),
        dropped=counts["dropped"],
        truncated=counts["truncated"],
        mean_tokens=round(statistics.mean(lengths), 2),
        median_tokens=statistics.median(lengths),
        histogram=_histogram(lengths),
        aborts=counts["aborts"],
        sampled_tokens=handle.sampled_tokens,
        delivered_tokens=sum(lengths),
    )


def _histogram(lengths: list[int]) -> dict[str, float]:
    pairs = itertools.pairwise(BINS)
    return {f"{low}-{high}": round(sum(low <= n < high for n in lengths) / len(lengths), 4) for low, high in pairs}


CASES: dict[str, dict[str, Any]] = {
    "undisturbed": {"restarts": False, "aborts": False},
    "continued": {"restarts": False},
    "restarted": {"restarts": True},
    "restarted_3_attempts": {"restarts": True, "max_attempts": EngineConfig().max_attempts},
    "dropped": {"restarts": False, "on_abort": "return"},
}


async def measure_all(completions: int, at_once: int) -> list[Case]:
    """Every case, on one engine."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_qwen3(Path(folder) / "model")
        config = ServiceConfig.model_validate(
            {
                "model": {"path": Path(folder) / "model"},
                "engine": {"max_model_len": 2 * LONGEST, "max_num_seqs": at_once},
                "kv_cache": {"dtype": "fp8_e4m3"},
                "weights": {"root": Path(folder) / "log"},
            }
        )
        async with engine(config, "fp8kv", await commit(config, None)) as adapter:
            return [await measure(name, adapter, completions, at_once, **case) for name, case in CASES.items()]


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table("", "mean", "median", *cases[0].histogram, "truncated", "dropped", "sampled / delivered")
    for c in cases:
        shares = [f"{share:.1%}" for share in c.histogram.values()]
        wasted = f"{c.sampled_tokens / c.delivered_tokens:.2f}"
        table.add_row(
            c.case, f"{c.mean_tokens:.1f}", f"{c.median_tokens:g}", *shares, f"{c.truncated}", f"{c.dropped}", wasted
        )
    return table


def main(
    completions: Annotated[int, typer.Option(help="That the trainer gets in each case.")] = 1200,
    at_once: Annotated[int, typer.Option(help="Prompts that run at any time; a step is half as many.")] = 64,
) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/length_bias.json."""
    cases = asyncio.run(measure_all(completions, at_once))
    console = Console()
    console.print(table_of(cases))
    content = {"at_once": at_once, "completions_in_a_step": at_once // 2, "cases": [asdict(case) for case in cases]}
    console.log(f"wrote {results.write('length_bias', content)}")


if __name__ == "__main__":
    typer.run(main)
