"""What measuring the mismatch costs, and whether the shadow tells a broken update from a good one.

    python -m benchmarks.mismatch.measuring

Cost: rollouts/s of one service in turns: unmeasured, with every rollout reported by a trainer, and with the shadow
scoring ``--share`` of them. Which turn a rollout belongs to is decided by its request id: the shadow samples by it.
Detection: ``--good`` versions of slightly moved weights, then for each layer a version in which its block scales are
doubled (``broken_version.py``); rollouts until the service calls it suspect.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.common.work import PRINTABLE, random_prompts
from benchmarks.mismatch.broken_version import commit_broken
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.local import LocalService, running_service
from rollout_service.protocol.mismatch import MismatchRow
from rollout_service.protocol.rollout import Rollout
from rollout_service.shadow.sample import is_sampled

Turn = Literal["unmeasured", "reports", "shadow"]
TURNS: tuple[Turn, ...] = ("unmeasured", "reports", "shadow")
WAVE = 20
"""Rollouts between two looks at a version's state."""
PATIENCE_S = 60.0
"""For the shadow to score what it was sent."""
DISTINCT = 64
"""Prompts."""
Say = Callable[[str], None]


class RequestOptions(Options):
    """A rollout."""

    n: int = 8
    """Completions."""
    prompt: int = 64
    """Tokens of the prompt."""
    out: int = 64
    """Tokens of a completion."""
    share: float = 0.05
    """Of the rollouts, for the shadow to score."""


class CostOptions(Options):
    """What measuring costs."""

    concurrent: int = 16
    """Rollouts at once."""
    batches: int = 6
    """So often in each turn."""
    repeats: int = 5
    """Turns of each kind."""


class DetectionOptions(Options):
    """What the shadow finds."""

    good: int = 20
    """Versions of slightly moved weights."""
    broken: int = 4
    """Layers that are doubled, one by one."""
    rollouts: int = 200
    """Of a version, at most."""


class Bench:
    """A service, its model's weights, and the shape of the work."""

    def __init__(self, client: RolloutClient, config: ServiceConfig, request: RequestOptions) -> None:
        self.client, self.config, self.n, self.out = client, config, request.n, request.out
        self.weights = load_file(config.model.path / "model.safetensors")
        self._prompts = itertools.cycle(random_prompts([request.prompt] * DISTINCT, PRINTABLE))
        self._numbers = itertools.count()

    def names(self, turn: Turn) -> Iterator[str]:
        """Request ids; those that the shadow would score are left out unless it is its turn."""
        share = self.config.shadow.share
        names = (f"{turn}-{number}" for number in self._numbers)
        return names if turn == "shadow" else (name for name in names if not is_sampled(name, share))

    async def rollouts(self, count: int, turn: Turn, version: int | None = None) -> list[Rollout]:
        """So many at once."""
        names = itertools.islice(self.names(turn), count)
        calls = [
            self.client.generate(
                next(self._prompts),
                n=self.n,
                max_tokens=self.out,
                ignore_eos=True,
                request_id=name,
                min_weight_version=version,
            )
            for name in names
        ]
        return list(await asyncio.gather(*calls))

    async def scored(self, version: int, tokens: int) -> MismatchRow | None:
        """The shadow's row of ``version`` once it has so many tokens."""
        until, row = time.monotonic() + PATIENCE_S, None
        while time.monotonic() < until:
            rows = (await self.client.mismatch(version)).rows
            row = next((row for row in rows if row.source == "shadow"), None)
            if (row.tokens if row else 0) >= tokens:
                return row
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the shadow was to score {tokens} tokens of version {version} and has {row}")

    def sampled_tokens(self, rollouts: list[Rollout]) -> int:
        """Tokens of those that the shadow scores."""
        share = self.config.shadow.share
        return sum(self.n * self.out for rollout in rollouts if is_sampled(rollout.request_id, share))

    def moved(self, step: int) -> dict[str, torch.Tensor]:
        """The weights, every matrix off by noise of 1% of its spread."""
        generator = torch.Generator().manual_seed(step)
        return {
            name: (t + 0.01 * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
            if t.ndim == 2
            else t
            for name, t in self.weights.items()
        }


async def cost(bench: Bench, options: CostOptions, say: Say) -> dict[str, list[float]]:
    """Rollouts/s of each turn; a first round is not counted."""
    rates: dict[str, list[float]] = {turn: [] for turn in TURNS}
    scored = 0
    for repeat in range(options.repeats + 1):
        for turn in TURNS if repeat % 2 else reversed(TURNS):
            started, reports = time.perf_counter(), []
            done: list[Rollout] = []
            for _ in range(options.batches):
                rollouts = await bench.rollouts(options.concurrent, turn)
                done += rollouts
                if turn == "reports":
                    logprobs = [c.logprobs for rollout in rollouts for c in rollout.completions]
                    reports.append(asyncio.create_task(bench.client.report_mismatch(rollouts, logprobs)))
            await asyncio.gather(*reports)
            rates[turn].append(len(done) / (time.perf_counter() - started))
            say(f"round {repeat} of {options.repeats}, {turn}: {rates[turn][-1]:.2f} rollouts/s")
            if turn == "shadow":  # what it is behind must not slow the next turn
                scored += bench.sampled_tokens(done)
                await bench.scored(0, scored)
    return {turn: of_turn[1:] for turn, of_turn in rates.items()}


async def detection(bench: Bench, options: DetectionOptions, say: Say) -> dict[str, Any]:
    """Good versions, then broken ones, each after a good one that it is made from."""
    found: dict[str, Any] = {"good": [], "broken": []}
    version = 0
    for step in range(options.good):
        version += 1
        await bench.client.push_weights(version, bench.moved(step))
        found["good"].append(await watched(bench, version, options.rollouts))
        say(line(found["good"][-1]))
    for layer in range(options.broken):
        version += 2
        await bench.client.push_weights(version - 1, bench.moved(options.good + layer))
        commit_broken(bench.config.weights.root, version, layer)
        found["broken"].append({"layer": layer} | await watched(bench, version, options.rollouts))
        say(line(found["broken"][-1]))
    return found


async def watched(bench: Bench, version: int, most: int) -> dict[str, Any]:
    """Rollouts of ``version`` until it is suspect, or ``most``."""
    tokens, count, row = 0, 0, None
    while count < most:
        count += WAVE
        tokens += bench.sampled_tokens(await bench.rollouts(WAVE, "shadow", version))
        row = await bench.scored(version, tokens)
        if row is not None and row.suspect_since is not None:
            break
    suspect = (await bench.client.weights(version)).suspect or ()
    figures = {} if row is None else row.model_dump(include={"tokens", "k3", "prob_error", "abs_diff_max"})
    return {
        "version": version,
        "rollouts": count,
        **figures,
        "suspect": [{"replica": s.replica_id, "since": s.since} for s in suspect],
    }


def name_of(version: dict[str, Any]) -> str:
    """What a version is."""
    return f"layer {version['layer']} doubled" if "layer" in version else f"good {version['version']}"


def line(version: dict[str, Any]) -> str:
    """For the log."""
    state = "suspect" if version["suspect"] else "not suspect"
    return f"{name_of(version)}: {state} after {version['rollouts']} rollouts, {version.get('tokens', 0)} tokens scored"


async def measure(
    service: LocalService, request: RequestOptions, costs: CostOptions, detected: DetectionOptions, say: Say
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """What ``cost`` and ``detection`` find."""
    async with RolloutClient(service.url) as client:
        bench = Bench(client, service.config, request)
        return await cost(bench, costs, say), await detection(bench, detected, say)


def main(request: RequestOptions, costs: CostOptions, detected: DetectionOptions) -> None:
    """Measure, print a table, and write benchmarks/results/<machine>/mismatch/measuring.json."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        overrides: dict[str, dict[str, Any]] = {
            "weights": {"root": folder + "/log", "poll_s": 1.0},
            "model": {"path": folder + "/tiny-qwen3"},
            "shadow": {"share": request.share},
        }
        with running_service(CPU_DEPLOYMENT, overrides) as service:
            rates, found = asyncio.run(measure(service, request, costs, detected, console.log))
            thresholds = service.config.monitor.model_dump(include={"suspect_k3", "suspect_prob_error", "min_tokens"})
    medians = {turn: statistics.median(of_turn) for turn, of_turn in rates.items()}
    ratios: dict[str, float] = {turn: medians[turn] / medians["unmeasured"] for turn in TURNS}
    shape = request.model_dump() | {"concurrent": costs.concurrent}
    content = {"shape": shape, "rollouts_per_s": rates, "ratio": ratios, "thresholds": thresholds, "detection": found}
    path = results.write("mismatch_measuring", content)
    console.print(*tables(medians, ratios, found))
    console.print(f"wrote {path}")


def tables(medians: dict[str, float], ratios: dict[str, float], found: dict[str, Any]) -> tuple[Table, Table]:
    """For people: the cost, and the versions."""
    table = Table("turn", "rollouts/s", "of unmeasured", title=f"Measuring on {results.machine()}")
    for turn in TURNS:
        table.add_row(turn, f"{medians[turn]:.2f}", f"{ratios[turn]:.3f}")
    versions = Table("version", "rollouts", "tokens scored", "k3", "probability error", "suspect")
    for each in found["good"] + found["broken"]:
        counts = (str(each["rollouts"]), str(each.get("tokens", 0)))
        figures = [f"{each[key]:.4f}" if key in each else "" for key in ("k3", "prob_error")]
        versions.add_row(name_of(each), *counts, *figures, str(bool(each["suspect"])))
    return table, versions


if __name__ == "__main__":
    run(main)
