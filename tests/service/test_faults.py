"""Cases of the fault matrix that matter most; the death of an engine under load is in test_replicas.py.

The definitions are those of ``python -m benchmarks.faults``, which runs all of them.
"""

from collections.abc import AsyncIterator

import pytest

from benchmarks.faults.ground import Ground
from benchmarks.faults.matrix import all_cases
from benchmarks.faults.outcome import run_case
from rollout_service.client import RolloutClient
from rollout_service.local import LocalService

CASES = {case.name: case for case in all_cases()}
THOSE_THAT_MATTER_MOST = ("two trainers at once",)
THOSE_THAT_TAKE_LONG = (
    # a real ingest is killed at these two moments in tests/unit/ingest/test_ingest_killed.py, too
    "kill ingest, before the rename",
    "kill ingest, after the rename",
    "kill replica, between start and finish of an update",
    "SIGTERM replica, generating",
    "SIGTERM ingest, generating",
    "SIGTERM gateway, generating",
    "SIGTERM monitor, generating",
    "a flipped byte in a file of the log",
)


@pytest.fixture
async def ground(service: LocalService, telltale: int) -> AsyncIterator[Ground]:
    """The session's service at weights that tell their version."""
    async with RolloutClient(service.url, token=service.config.auth.secret(), retries=12) as client:
        yield Ground(service, client, committed=telltale)


@pytest.mark.parametrize(
    "name",
    [*THOSE_THAT_MATTER_MOST, *(pytest.param(name, marks=pytest.mark.slow) for name in THOSE_THAT_TAKE_LONG)],
)
async def test_the_service_recovers_and_nothing_is_stale_or_lost(name, ground):
    outcome = await run_case(ground, CASES[name])
    assert outcome.survived, outcome.notes
    assert (outcome.stale_tokens, outcome.lost_requests, outcome.lost_versions) == (0, 0, 0), outcome.notes
    assert outcome.rollouts > 0
