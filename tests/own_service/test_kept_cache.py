"""A KV cache that outlives updates, with two gateways, two replicas, and the death of one."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
UPDATES = 50
RUN = """
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


@pytest.mark.timeout(900)
async def test_kept_caches_outlive_updates_and_a_replica(tmp_path):
    # in a process of its own: this one may have the session's service
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, str(tmp_path), str(UPDATES), cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["survived"], outcome["notes"]
    assert (outcome["stale_tokens"], outcome["lost_requests"], outcome["lost_versions"]) == (0, 0, 0), outcome["notes"]
    assert outcome["committed"] == 1 + UPDATES and outcome["kept_tokens"] > 0
