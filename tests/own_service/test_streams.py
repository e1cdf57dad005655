"""A killed replica's long rollouts go on from what had left it."""

import asyncio
import json
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
RUN = """
import asyncio, dataclasses, json, sys
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.rollout.streams import LoadOptions, measure, overrides_in
from rollout_service.local import running_service
options = LoadOptions(kills=1, at_once=6)
async def one_round(service):
    async for found in measure(service, options):
        print(json.dumps(dataclasses.asdict(found)))
with running_service(CPU_DEPLOYMENT, overrides_in(sys.argv[1], options)) as service:
    asyncio.run(one_round(service))
"""


async def test_rollouts_outlive_a_killed_replica_with_their_tokens(tmp_path):
    # in a process of its own: this one may have the session's service
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, str(tmp_path), cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    found = json.loads(output.splitlines()[-1])
    assert (found["stale"], found["failed"], found["rollouts"]) == ([], [], 12)
    assert found["lost_s"]  # of those that have tokens of both replicas
