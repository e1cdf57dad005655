"""What the service costs: tokens/s through HTTP, gateway and replica against the bare vLLM engine inside.

    python -m benchmarks.rollout.overhead

The same engine arguments, weights and prompts, one engine each, one after the other in one run; and what an update
costs meanwhile: seconds from the trainer's first byte until every replica is live, and seconds a replica is closed.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.common import results
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.local import load_config, running_service
from rollout_service.protocol.sampling import Sampling

PROJECT = Path(__file__).parents[2]
DEPLOYMENT = PROJECT / "deployments/cpu_rollout.yaml"


def prompts(groups: int, tokens: int) -> list[list[int]]:
    """Distinct prompts of the tiny model's printable characters."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(6, 100, (tokens,), generator=generator).tolist() for _ in range(groups)]


async def through_the_service(
    url: str, model: Path, work: list[list[int]], n: int, out: int, repeats: int
) -> dict[str, Any]:
    """Tokens/s of each repeat, then the updates' seconds."""
    rates, push_s, closed_s = [], [], []
    weights = load_file(model / "model.safetensors")
    async with RolloutClient(url) as client:
        for _ in range(repeats + 1):
            started = time.perf_counter()
            await client.generate_batch(work, n=n, max_tokens=out, ignore_eos=True)
            rates.append(len(work) * n * out / (time.perf_counter() - started))
        for version in range(1, repeats + 1):
            started = time.perf_counter()
            status = await client.push_weights(version, weights)
            push_s.append(time.perf_counter() - started)
            closed_s += [replica.update.closed_s for replica in status.replicas if replica.update]
    return {"tokens_per_s": rates[1:], "push_to_live_s": push_s, "closed_s": closed_s}


async def bare(config: ServiceConfig, work: list[list[int]], n: int, out: int, repeats: int) -> list[float]:
    """Tokens/s of each repeat of the engine alone, with the version that the service made from the model."""
    from rollout_service.engine.adapter import EngineAdapter
    from rollout_service.engine.args import engine_args
    from rollout_service.engine.plugin import register
    from rollout_service.store.log import WeightLog

    register()
    engine = EngineAdapter(engine_args(config, (), has_tokenizer=True))
    log, rates, sampling = WeightLog(config.weights.root), [], Sampling(n=n, max_tokens=out, ignore_eos=True)
    try:
        await engine.connect()
        await engine.pause("keep")
        await engine.load(log.folder(log.versions()[-1]), 0)
        await engine.resume()
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            await asyncio.gather(*(engine.generate(f"{repeat}-{i}", tuple(p), sampling) for i, p in enumerate(work)))
            rates.append(len(work) * n * out / (time.perf_counter() - started))
    finally:
        engine.shutdown()
    return rates[1:]


def main(groups: int = 16, n: int = 8, prompt: int = 64, out: int = 64, repeats: int = 5) -> None:
    """Measure, print a table, write the JSON."""
    work = prompts(groups, prompt)
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"weights": {"root": folder + "/log"}, "model": {"path": folder + "/tiny-qwen3"}}
        with running_service(DEPLOYMENT, overrides) as service:
            model = service.config.model.path
            served = asyncio.run(through_the_service(service.url, model, work, n, out, repeats))
        alone = asyncio.run(bare(load_config(DEPLOYMENT, overrides).resolved(), work, n, out, repeats))
    ratio = statistics.median(served["tokens_per_s"]) / statistics.median(alone)
    shape = {"groups": groups, "n": n, "prompt_tokens": prompt, "output_tokens": out}
    path = results.write("overhead", {"shape": shape, "service": served, "bare_tokens_per_s": alone, "ratio": ratio})
    _print(served, alone, ratio, path)


def _print(served: dict[str, Any], alone: list[float], ratio: float, path: Path) -> None:
    table = Table("median", "service", "bare engine", "ratio", title=f"The service on {results.machine()}")
    median = statistics.median
    table.add_row("tokens/s", f"{median(served['tokens_per_s']):.0f}", f"{median(alone):.0f}", f"{ratio:.2f}")
    table.add_row("update: push to live, s", f"{median(served['push_to_live_s']):.2f}", "", "")
    table.add_row("update: replica closed, s", f"{median(served['closed_s']):.3f}", "", "")
    console = Console()
    console.print(table)
    console.print(f"written to {path.relative_to(PROJECT)}")


if __name__ == "__main__":
    typer.run(main)
