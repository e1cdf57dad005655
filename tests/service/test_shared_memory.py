"""Weights through memory that this process and the service's ingest share."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rollout_service.client import _shared_memory
from rollout_service.protocol.weights import WeightStatus
from tests.service.conftest import TOKEN
from tests.support.telltale import assert_pure, canary_weights

PUSHES_HALF = """
import sys, time
from rollout_service.client import SyncRolloutClient, _shared_memory
from tests.support.telltale import canary_weights
from pathlib import Path

url, token, model, version = sys.argv[1:]
_shared_memory.BATCH_BYTES = 100_000
weights = canary_weights(Path(model), int(version))
with SyncRolloutClient(url, token=token) as client:
    def tell(done, total):
        print(done, flush=True)
        time.sleep(3600)
    client.push_weights(int(version), weights, transport="shared_memory", progress=tell)
"""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_memory, "BATCH_BYTES", 1 << 20)


async def test_every_replica_serves_what_was_shared(service, client, next_version):
    weights = canary_weights(service.config.model.path, next_version)
    shared = await client.push_weights(next_version, weights, transport="shared_memory")
    assert shared.state == "live"
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (next_version,)
    assert_pure(completion)
    in_parts: WeightStatus = await client.push_weights("next", weights, transport="http")
    assert in_parts.digest == shared.digest


async def test_a_trainer_that_is_killed_in_the_middle_leaves_nothing_behind(service, client, next_version):
    arguments = [service.url, TOKEN, str(service.config.model.path), str(next_version)]
    with subprocess.Popen([sys.executable, "-c", PUSHES_HALF, *arguments], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        await asyncio.to_thread(trainer.stdout.readline)
        os.kill(trainer.pid, signal.SIGKILL)
    status = next(s for s in await client.weights() if s.version == next_version)
    assert status.state == "staged"
    weights = canary_weights(service.config.model.path, next_version)
    pushed = await client.push_weights(next_version, weights, transport="shared_memory")  # takes the dead one's place
    assert pushed.state == "live"
