"""What the service costs: tokens/s through HTTP, gateway and replica against the bare vLLM engine inside.

    python -m benchmarks.rollout.overhead

The same engine arguments, weights and prompts, one engine each, one after the other in one run; and what an update
costs meanwhile: seconds from the trainer's first byte until every replica is live, and seconds a replica is closed.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.engine import bare_engine, load_version
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.common.work import PRINTABLE, Work, WorkOptions
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.local import load_config, running_service
from rollout_service.store.log import WeightLog


class SmallWork(WorkOptions):
    """The work."""

    n: int = 8
    """Completions of each prompt."""
    prompt_min: int = 64
    """Tokens of the shortest prompt."""
    prompt_max: int = 64
    """Tokens of the longest prompt; lengths are spread evenly between them."""
    out: int = 64
    """Tokens of a completion."""


@dataclass
class Served:
    """What the service did."""

    tokens_per_s: list[float] = field(default_factory=list)
    push_to_live_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)
    """Of each replica's update."""


async def through_the_service(url: str, model: Path, work: Work, repeats: int) -> Served:
    """Rollouts, then updates."""
    weights = load_file(model / "model.safetensors")
    async with RolloutClient(url) as client:

        def rollouts() -> Awaitable[object]:
            return client.generate_batch(work.prompts, n=work.n, max_tokens=work.out, ignore_eos=True)

        served = Served(await tokens_per_s(work, repeats, rollouts))
        for version in range(1, repeats + 1):
            started = time.perf_counter()
            status = await client.push_weights(version, weights)
            served.push_to_live_s.append(time.perf_counter() - started)
            served.closed_s += [replica.update.closed_s for replica in status.replicas if replica.update]
    return served


async def bare(config: ServiceConfig, work: Work, repeats: int) -> list[float]:
    """Tokens/s of the engine alone, with the newest version of the service's log."""
    log = WeightLog(config.weights.root)
    version = log.versions()[-1]
    async with bare_engine(config, has_tokenizer=True) as engine:
        await load_version(engine, log.folder(version), version)
        numbers = itertools.count()

        async def rollouts() -> None:
            calls = [engine.generate(f"{next(numbers)}", tuple(prompt), work.sampling) for prompt in work.prompts]
            await asyncio.gather(*calls)

        return await tokens_per_s(work, repeats, rollouts)


async def tokens_per_s(work: Work, repeats: int, rollouts: Callable[[], Awaitable[object]]) -> list[float]:
    """Of each time that all of the work is done; a first time is not counted."""
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        await rollouts()
        rates.append(work.tokens / (time.perf_counter() - started))
    return rates[1:]


def main(options: SmallWork, repeats: int = 5) -> None:
    """Measure, print a table, write benchmarks/results/<machine>/rollout/overhead.json."""
    work = options.make(PRINTABLE)
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"weights": {"root": folder + "/log"}, "model": {"path": folder + "/tiny-qwen3"}}
        with running_service(CPU_DEPLOYMENT, overrides) as service:
            model = service.config.model.path
            served = asyncio.run(through_the_service(service.url, model, work, repeats))
        alone = asyncio.run(bare(load_config(CPU_DEPLOYMENT, overrides).resolved(), work, repeats))
    ratio = statistics.median(served.tokens_per_s) / statistics.median(alone)
    content = {"work": options.as_json(), "service": asdict(served), "bare_tokens_per_s": alone, "ratio": ratio}
    path = results.write("rollout_overhead", content)
    console = Console()
    console.print(table_of(served, alone, ratio))
    console.print(f"wrote {path}")


def table_of(served: Served, alone: list[float], ratio: float) -> Table:
    """For people."""
    table = Table("median", "service", "bare engine", "ratio", title=f"The service on {results.machine()}")
    median = statistics.median
    table.add_row("tokens/s", f"{median(served.tokens_per_s):.0f}", f"{median(alone):.0f}", f"{ratio:.2f}")
    table.add_row("update: push to live, s", f"{median(served.push_to_live_s):.2f}", "", "")
    table.add_row("update: replica closed, s", f"{median(served.closed_s):.3f}", "", "")
    return table


if __name__ == "__main__":
    run(main)
