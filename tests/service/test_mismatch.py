"""A trainer reports its logprobs of real rollouts, and the service says how far apart they are."""

import asyncio
import math

import pytest

from rollout_service.client import RolloutClient
from rollout_service.protocol.rollout import Rollout
from tests.support.processes import descendants

PROMPTS = [[5 + i, 6] for i in range(16)]


async def rollouts_of(client: RolloutClient, version: int) -> list[Rollout]:
    return await client.generate_batch(PROMPTS, n=2, max_tokens=16, ignore_eos=True, min_weight_version=version)


def scored(rollouts: list[Rollout], *offsets: float) -> list[list[float]]:
    """A trainer that differs from the engines by these offsets in turn, in nats."""
    return [
        [logprob - offsets[i % len(offsets)] for i, logprob in enumerate(completion.logprobs)]
        for rollout in rollouts
        for completion in rollout.completions
    ]


def k3_of(*offsets: float) -> float:
    return math.fsum(math.exp(-offset) - 1 + offset for offset in offsets) / len(offsets)


async def test_reports_are_counted_per_replica(client, telltale):
    rollouts = await rollouts_of(client, telltale)
    trainer = scored(rollouts, 0.0, 0.05, 0.1, 0.25)
    tokens = sum(map(len, trainer))
    assert (await client.report_mismatch(rollouts, trainer)).tokens == tokens
    in_full = await client.mismatch(telltale)
    assert (await client.report_mismatch(rollouts, trainer)).tokens == tokens
    twice = await client.mismatch(telltale)
    assert {row.replica_id for row in in_full.rows} == {rollout.replica_id for rollout in rollouts}
    assert [(row.version, row.tokens, row.sequences) for row in in_full.versions] == [
        (telltale, tokens, 2 * len(PROMPTS))
    ]
    for once, again in zip([*in_full.rows, *in_full.versions], [*twice.rows, *twice.versions], strict=True):
        assert again.tokens == 2 * once.tokens
        assert once.k3 == pytest.approx(k3_of(0.0, 0.05, 0.1, 0.25), rel=1e-9)
        assert again.k3 == pytest.approx(once.k3, rel=1e-12)
        assert again.abs_diff_max == once.abs_diff_max == pytest.approx(0.25)


async def test_rollouts_go_on_while_reports_are_counted(client, telltale):
    rollouts = await rollouts_of(client, telltale)
    trainer = scored(rollouts, 0.0)
    receipts = asyncio.gather(*(client.report_mismatch(rollouts, trainer) for _ in range(8)))
    more = await rollouts_of(client, telltale)
    assert len(more) == len(PROMPTS)
    (row,) = (await client.mismatch(telltale)).versions if await receipts else ()
    assert row.tokens == 8 * sum(map(len, trainer)) and row.k3 == 0.0


async def test_rollouts_and_updates_do_not_need_the_monitor(client, telltale):
    (monitor,) = descendants("ray::ServeReplica:rollout:monitor")
    monitor.suspend()
    try:
        rollouts = await rollouts_of(client, telltale)
        status = await client.weights(telltale)
    finally:
        monitor.resume()
    assert len(rollouts) == len(PROMPTS)
    assert (status.state, status.suspect) == ("live", None)
