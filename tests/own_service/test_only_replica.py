"""The only engine ends: nobody is served until another one has started, and hardly longer."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
RUN = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from benchmarks.faults.matrix import all_cases, run
cases = [case for case in all_cases() if case.name == sys.argv[2]]
(outcome,) = asyncio.run(run(Path(sys.argv[1]), cases, lambda _: None))
print(json.dumps(dataclasses.asdict(outcome)))
"""


@pytest.mark.parametrize("name", ["SIGTERM the only replica, generating", "kill the only replica, generating"])
async def test_losing_the_only_replica_costs_about_one_engine_start(name, tmp_path):
    # in a process of its own: this one may have the session's service
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, str(tmp_path), name, cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["survived"], outcome["notes"]
    assert (outcome["stale_tokens"], outcome["lost_requests"], outcome["lost_versions"]) == (0, 0, 0), outcome["notes"]
    assert outcome["outage_s"] <= outcome["engine_start_s"] + 5
