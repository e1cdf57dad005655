"""A ``WeightSync`` between a real log on disk and a small engine and ingest in this process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.protocol.weight_log import DesiredState
from rollout_service.store.log import WeightLog
from tests.unit.engine.fakes import FakeEngine, FakeIngest
from tests.unit.store.versions import commit


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path / "log")
    commit(log, 0)
    return log


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def ingest() -> FakeIngest:
    return FakeIngest(DesiredState(version=0, paused=False, pause_mode="keep"))


@pytest.fixture
async def follower(log: WeightLog, engine: FakeEngine, ingest: FakeIngest) -> AsyncIterator[Callable[..., WeightSync]]:
    """Makes a follower that is not started yet; the test's end stops it."""
    made: list[WeightSync] = []

    def make(fingerprint: str = "model", weights: dict[str, object] | None = None, **parts: object) -> WeightSync:
        config = WeightsConfig.model_validate({"root": log.root, "poll_s": 0.01, **(weights or {})})
        made.append(WeightSync("r1", engine, ingest, config, fingerprint, **parts))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def started(follower: Callable[..., WeightSync], engine: FakeEngine) -> Callable[..., Awaitable[WeightSync]]:
    """Makes a follower and starts it: it serves version 0 and follows."""

    async def start(**parts: object) -> WeightSync:
        weight_sync = follower(**parts)
        await weight_sync.start()
        engine.calls.clear()
        return weight_sync

    return start


@pytest.fixture
async def weight_sync(started: Callable[..., Awaitable[WeightSync]]) -> WeightSync:
    return await started()
