"""Replicas that come while weights move, and go while rollouts run, by the service's own autoscaling."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from benchmarks.faults.ground import PROCESSES, WAIT_S, Case, Ground, ground
from tests.support.processes import descendants

SCALING = {
    "max_replicas": 2,
    "target_sequences": 8,
    "upscale_delay_s": 0,
    "downscale_delay_s": 5,
    "drain_timeout_s": 60,
}
"""One replica is enough for ``LITTLE_LOAD``, and not for the load of the other cases."""
LITTLE_LOAD = 4


def scale_cases() -> Iterator[Case]:
    """One after the other on one service: the second starts with the replica that the first brought."""
    yield Case("scale-up from 1 to 2 replicas during updates", up_while_updating, ground=autoscaled)
    yield Case("scale-down from 2 to 1 replicas under load", down_under_load, LITTLE_LOAD, ground=autoscaled)


def autoscaled(folder: Path, **settings: dict[str, Any]) -> AbstractAsyncContextManager[Ground]:
    """One replica, or two under load."""
    return ground(folder, replicas=1, scaling=SCALING, **settings)


async def up_while_updating(ground: Ground) -> None:
    """From the start of the second replica's process until the fleet has it, versions are committed all the time."""
    (first,) = await ground.replica_ids()
    async with asyncio.timeout(WAIT_S):
        while len(descendants(PROCESSES["replica"])) < 2:
            await asyncio.sleep(0.2)
        ground.replicas, begun = 2, ground.committed
        while not any(r.state == "ready" for r in (await ground.client.fleet()).replicas if r.replica_id != first):
            await ground.push(ground.committed + 1, wait="none")
            await asyncio.sleep(1)
    ground.note(f"{ground.committed - begun} versions were committed while the second replica started")


async def down_under_load(ground: Ground) -> None:
    """Few rollouts go on and on, and a replica is taken away from among them."""
    before = await ground.replica_ids()
    fleet = await ground.until_fleet(lambda fleet: len(fleet.replicas) == 1, "has one replica")
    ground.replicas = 1
    ground.note(f"from {len(before)} to {len(fleet.replicas)} replicas with {fleet.replicas[0].running} sequences")
    await ground.push(ground.committed + 1, wait="none")
