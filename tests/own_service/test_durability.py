"""Live before durable, through the whole service: the ingest's machine loses its memory while a version is copied."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_service.client import RolloutClient
from rollout_service.errors import NotReady, VersionConflict
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.store.log import WeightLog
from tests.support.moments import resume, stop_at, wait_for
from tests.support.own_service import own_service
from tests.support.processes import descendants
from tests.support.telltale import canary_weights

pytestmark = pytest.mark.slow

INGEST = "ray::ServeReplica:rollout:ingest"
LONG_S = 120.0


@pytest.fixture
def memory() -> Iterator[WeightLog]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield WeightLog(Path(folder) / "log")


@pytest.fixture
def disk(tmp_path: Path) -> WeightLog:
    return WeightLog(tmp_path / "disk")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_qwen3(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
async def url(model: Path, memory: WeightLog, disk: WeightLog) -> AsyncIterator[str]:
    """A service without engines: who serves what is not asked here."""
    weights = {"root": str(memory.root), "durability": "behind", "durable_root": str(disk.root), "poll_s": 1.0}
    scaling = {"min_replicas": 0, "max_replicas": 1}
    async with own_service({"model": {"path": str(model)}, "weights": weights, "scaling": scaling}) as (url, _):
        yield url


def newest(log: WeightLog) -> int:
    head = log.head()
    return -1 if head is None else head.version


async def pushed_until_not_durable(client: RolloutClient, model: Path, memory: WeightLog, disk: WeightLog) -> int:
    """Push versions until one is live while its copy has begun, and the ingest stands still then; returns that one."""
    for version in range(2, 20):
        weights = canary_weights(model, version)
        pushing = asyncio.create_task(client.push_weights(version, weights, wait="none"))
        if await asyncio.to_thread(_stopped, version, memory, disk):
            pushing.cancel()
            await asyncio.wait([pushing])
            return version
        await pushing
    raise AssertionError("no copy was ever seen in the moment")


def _stopped(version: int, memory: WeightLog, disk: WeightLog) -> bool:
    [ingest] = descendants(INGEST)
    if not wait_for(memory.staging(version).is_dir, LONG_S):
        return False
    return stop_at(ingest, lambda: newest(memory) == version > newest(disk) and disk.staging(version).is_dir(), 3.0)


async def shown(url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    [sample] = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return float(sample.value)


async def latest(client: RolloutClient) -> int:
    """Once there is an ingest again."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                return max(status.version for status in await client.weights() if status.state != "staged")
            except NotReady:
                await asyncio.sleep(0.1)


async def test_a_crash_of_the_machine_takes_only_what_was_not_durable(
    url: str, model: Path, memory: WeightLog, disk: WeightLog
) -> None:
    async with RolloutClient(url, retries=12) as client:
        first = await client.push_weights(1, canary_weights(model, 1), label="run/1", wait="durable")
        assert first.durable and newest(disk) == 1
        assert await shown(url, "rollout_durable_version") == 1
        assert await shown(url, "rollout_durable_behind_seconds") == 0

        lost = await pushed_until_not_durable(client, model, memory, disk)
        [ingest] = descendants(INGEST)
        safe = newest(disk)
        ingest.kill()
        shutil.rmtree(memory.root)
        resume(ingest)

        assert await latest(client) == safe < lost
        assert (await client.weights(safe)).durable
        with pytest.raises(VersionConflict, match=f"version {lost} was served with the digest"):
            await client.push_weights(lost, canary_weights(model, lost + 1), wait="none")
        await client.discard(lost)
        again = await client.push_weights(lost, canary_weights(model, lost), wait="durable")
        assert again.durable and newest(disk) == lost
        following = await client.push_weights("next", canary_weights(model, lost + 1), wait="durable")
        assert following.version == lost + 1
    disk.verify(disk.manifest(following.version))
