"""What it gains that prompts which begin alike go to one replica: prefix-cache hits with two replicas, on the CPU.

    python -m benchmarks.rollout.prompt_routing

The shipped CPU deployment with two engines, started twice: with its router, and with one that knows no prompt's
beginning. A group's completions are asked for one by one, as agents and some trainers do: calls of all groups in random
order, so many at once. Hits are vLLM's own counters, from Ray's agents; what replicas a group's completions came from
is what rollouts say. A group that is in one place is what attention can read once, too (docs/group_attention.md).
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.common.work import PRINTABLE, random_prompts
from rollout_service.client import RolloutClient
from rollout_service.fleet import routing
from rollout_service.local import LocalService, running_service

RESULT = "rollout_prompt_routing"
PREFIX_TOKENS = routing.PREFIX_TOKENS
NEVER = 1 << 30
"""Tokens that no prompt has."""
QUERIES, HITS = "ray_vllm_prefix_cache_queries_total", "ray_vllm_prefix_cache_hits_total"
COUNTED_S = 60
"""Ray's processes tell what they counted every ten seconds."""


class RoutingOptions(Options):
    """The work."""

    groups: int = 16
    """Distinct prompts."""
    n: int = 8
    """Completions of each, one a call."""
    prompt: int = 1024
    """Tokens of a prompt."""
    out: int = 16
    """Tokens of a completion."""
    at_once: int = 24
    """Calls under way."""
    capacity: int = 32
    """Sequences that a replica decodes at once."""


@dataclass
class Side:
    """One service's figures."""

    side: str
    queried_tokens: float
    hit_tokens: float
    hit_share: float
    replicas_of_a_group: float
    """Mean."""
    most_loaded_share: float
    """Of all completions, those of the replica that made more."""
    seconds: float


async def prefix_cache(service: LocalService) -> tuple[float, float]:
    """Tokens that were looked up in prefix caches so far, and those found."""
    async with httpx.AsyncClient(timeout=60) as http:
        replies = [(await http.get(url)).raise_for_status().text for url in service.metrics_targets[1:]]
    families = [family for text in replies for family in text_string_to_metric_families(text)]
    samples = [sample for family in families for sample in family.samples]
    queried, hit = (sum(s.value for s in samples if s.name == name) for name in (QUERIES, HITS))
    return queried, hit


async def asked(service: LocalService, options: RoutingOptions, side: str) -> Side:
    """All calls, and what they came to. Raises RuntimeError if the agents do not count them all."""
    prompts = random_prompts([options.prompt] * options.groups, PRINTABLE)
    order = [group for group in range(options.groups) for _ in range(options.n)]
    random.Random(0).shuffle(order)
    places, room = [Counter[str | None]() for _ in prompts], asyncio.Semaphore(options.at_once)
    queried_before, hit_before = await prefix_cache(service)
    async with RolloutClient(service.url) as client:

        async def one(group: int) -> None:
            async with room:
                rollout = await client.generate(prompts[group], max_tokens=options.out, ignore_eos=True)
            places[group][rollout.replica_id] += 1

        started = time.perf_counter()
        await asyncio.gather(*map(one, order))
        seconds = time.perf_counter() - started
    expected = len(order) * options.prompt
    for _ in range(COUNTED_S):
        queried, hit = await prefix_cache(service)
        if queried - queried_before >= expected:
            break
        await asyncio.sleep(1)
    else:
        raise RuntimeError(f"{queried - queried_before:.0f} of {expected} tokens were counted in {COUNTED_S} s")
    found, total = hit - hit_before, sum(places, Counter())
    return Side(
        side=side,
        queried_tokens=queried - queried_before,
        hit_tokens=found,
        hit_share=found / (queried - queried_before),
        replicas_of_a_group=statistics.mean(map(len, places)),
        most_loaded_share=max(total.values()) / total.total(),
        seconds=seconds,
    )


def measure(options: RoutingOptions, side: str, prefix_tokens: int) -> Side:
    """One service."""
    routing.PREFIX_TOKENS = prefix_tokens  # Serve ships the module as it is here
    with tempfile.TemporaryDirectory() as folder:
        overrides: dict[str, dict[str, object]] = {
            "weights": {"root": folder + "/log"},
            "model": {"path": folder + "/tiny-qwen3"},
            "engine": {"max_model_len": 2048, "max_num_seqs": options.capacity},
            "scaling": {"min_replicas": 2, "max_replicas": 2},
        }
        with running_service(CPU_DEPLOYMENT, overrides) as service:
            return asyncio.run(asked(service, options, side))


def table_of(sides: list[Side], options: RoutingOptions) -> Table:
    """For people."""
    title = f"{options.groups} groups of {options.n} calls, prompts of {options.prompt} tokens, two replicas"
    table = Table(title=title)
    for column in ("router", "tokens found", "replicas of a group", "most loaded", "seconds"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for s in sides:
        figures = (
            f"{s.hit_share:.1%}",
            f"{s.replicas_of_a_group:.2f}",
            f"{s.most_loaded_share:.0%}",
            f"{s.seconds:.1f}",
        )
        table.add_row(s.side, *figures)
    return table


def main(options: RoutingOptions) -> None:
    """Measure, print a table, write benchmarks/results/<machine>/rollout_prompt_routing.json."""
    sides = [
        measure(options, side, tokens)
        for side, tokens in {"by prompts' beginnings": PREFIX_TOKENS, "by load alone": NEVER}.items()
    ]
    console = Console()
    console.print(table_of(sides, options))
    path = results.write(RESULT, {"work": options.model_dump(), "cases": [asdict(side) for side in sides]})
    console.print(f"wrote {path}")


if __name__ == "__main__":
    run(main)
