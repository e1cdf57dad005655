"""Faults of ``benchmarks/faults`` that need services of their own: a kept KV cache, an only replica, and two nodes."""

import dataclasses
import json

import pytest

from benchmarks.faults import nodes
from benchmarks.faults.outcome import is_clean
from tests.own_service.apart import run_apart

UPDATES = 50
KEPT_CACHE = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from benchmarks.faults.ground import KEPT_CACHE, Case, Ground, ground
from benchmarks.faults.outcome import run_case

async def update_and_kill(place: Ground) -> None:
    for update in range(int(sys.argv[2])):
        await place.push(place.committed + 1, wait="none" if update % 2 else "all")
        if update == 20:
            await place.kill("replica")

async def main() -> None:
    async with ground(Path(sys.argv[1]), scaling={"gateways": 2}, **KEPT_CACHE) as place:
        outcome = await run_case(place, Case("updates", update_and_kill))
        print(json.dumps(dataclasses.asdict(outcome) | {"committed": place.committed}))

asyncio.run(main())
"""
ONLY_REPLICA = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from benchmarks.faults.matrix import all_cases, run
cases = [case for case in all_cases() if case.name == sys.argv[2]]
(outcome,) = asyncio.run(run(Path(sys.argv[1]), cases, lambda _: None))
print(json.dumps(dataclasses.asdict(outcome)))
"""


@pytest.mark.timeout(900)
async def test_kept_caches_outlive_updates_and_a_replica(tmp_path):
    """With two gateways and two replicas."""
    outcome = json.loads((await run_apart(KEPT_CACHE, str(tmp_path), str(UPDATES)))[-1])
    assert is_clean(outcome), outcome["notes"]
    assert outcome["committed"] == 1 + UPDATES and outcome["kept_tokens"] > 0


@pytest.mark.parametrize("name", ["SIGTERM the only replica, generating", "kill the only replica, generating"])
async def test_losing_the_only_replica_costs_about_one_engine_start(name, tmp_path):
    outcome = json.loads((await run_apart(ONLY_REPLICA, str(tmp_path), name))[-1])
    assert is_clean(outcome), outcome["notes"]
    assert outcome["outage_s"] <= outcome["engine_start_s"] + 5


@pytest.mark.parametrize(("case", "versions"), [(nodes.KILLED, 5), (nodes.DRAINED, 3)])
async def test_a_node_without_the_log_updates_and_goes_without_loss(case, versions, tmp_path):
    """Of two Ray nodes on this machine. A node that is drained is left once its replica has been replaced."""
    outcome = await nodes.run_apart(case, tmp_path)
    assert outcome.copied_versions == list(range(1, versions + 1))
    assert outcome.notes == [] and is_clean(dataclasses.asdict(outcome))
    assert outcome.rollouts > 0
