"""A replica whose engine is lost ends its process, so that Serve replaces it at once."""

import pytest

from rollout_service.engine.admission import AdmissionLimit
from rollout_service.engine.handover import HandOver
from rollout_service.engine.replica import EngineReplica
from rollout_service.errors import EngineFailed
from rollout_service.runtime import drain
from rollout_service.runtime.drain import Drain


class Ended(BaseException):
    """The process has ended."""


class Engine:
    """An engine whose process is dead, or lives."""

    def __init__(self) -> None:
        self.dead, self.stopped = False, False

    async def check_health(self) -> None:
        if self.dead:
            raise EngineFailed("the engine's process is dead")

    def shutdown(self) -> None:
        self.stopped = True


class WeightSync:
    """Follows the log until it leaves."""

    def __init__(self) -> None:
        self.left = False

    async def caught_up(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    async def leave(self) -> None:
        self.left = True


class Replica(EngineReplica):
    """Made of parts by a test."""

    def __init__(self, routed: bool) -> None:
        self._replica_id, self._routed = "r1", routed
        self._engine, self._weight_sync, self._drain = Engine(), WeightSync(), Drain(30.0)
        self._hand_over = HandOver(self._drain, AdmissionLimit(4), self._alone)

    async def _alone(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(drain.os, "_exit", end)


async def test_a_replica_ends_when_its_engine_is_dead():
    replica = Replica(routed=True)
    await replica.check_health()
    replica._engine.dead = True
    with pytest.raises(Ended, match="1"):
        await replica.check_health()
    assert replica._weight_sync.left and replica._engine.stopped


async def test_a_replica_that_does_not_serve_yet_says_why_it_cannot():
    replica = Replica(routed=False)
    replica._engine.dead = True
    with pytest.raises(EngineFailed, match="process is dead"):
        await replica.check_health()
