"""A replica that starts is seen while its engine keeps the event loop busy."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from rollout_service.engine.child_errors import tell_errors
from rollout_service.engine.startup import StartupHeartbeat, says_why_it_fails
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from tests.support.handles import FakeMethod

LONG_S = 30.0


class Ingest(FakeMethod):
    """Keeps reports; handle and method of a Serve deployment in one."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reports: list[ReplicaStatus] = []
        self.enough = threading.Event()

    @property
    def report(self) -> "Ingest":
        return self

    async def remote(self, status: ReplicaStatus) -> None:
        self.reports.append(status)
        if len(self.reports) >= 3:
            self.enough.set()
        if self.failures > 0:
            self.failures -= 1
            raise ActorDiedError()


@pytest.mark.parametrize("failures", [0, 2], ids=["ingest there", "ingest away at first"])
def test_it_reports_from_its_own_thread_until_the_block_ends(failures):
    ingest = Ingest(failures)
    with StartupHeartbeat("r1", ingest, 0.001) as announcement:
        assert ingest.enough.wait(LONG_S)
    announcement._thread.join(LONG_S)
    assert not announcement._thread.is_alive()
    assert {(s.replica_id, s.state, s.version) for s in ingest.reports} == {("r1", "starting", None)}
    sequences = [status.sequence for status in ingest.reports]
    assert sequences == sorted(set(sequences))


def test_a_start_that_waits_for_a_gpu_says_so():
    ingest = Ingest()
    with StartupHeartbeat("r1", ingest, 0.001) as announcement:
        announcement.waits_for("GPU 1: taken")
        ingest.enough.clear()
        ingest.reports.clear()
        assert ingest.enough.wait(LONG_S)
        waiting = Fleet(latest_version=0, paused=False, replicas=(ingest.reports[-1],))
        announcement.waits_for(None)
    assert waiting.replicas[0].error == "GPU 1: taken" and waiting.blocked_starts == 1
    assert Fleet(latest_version=0, paused=False, replicas=(announcement.status(),)).blocked_starts == 0


def test_it_says_what_the_follower_says_once_there_is_one():
    ingest = Ingest()
    with StartupHeartbeat("r1", ingest, 0.001) as announcement:
        announcement.status = lambda: ReplicaStatus(
            replica_id="r1", sequence=7, version=None, state="syncing", target=4
        )
        ingest.enough.clear()
        ingest.reports.clear()
        assert ingest.enough.wait(LONG_S)
    assert ingest.reports[-1].target == 4


class LastWord(FakeMethod):
    """Keeps the report of a replica that could not start; handle and method in one."""

    def __init__(self, away: bool = False) -> None:
        self._away = away
        self.heard: list[ReplicaStatus] = []

    @property
    def report(self) -> "LastWord":
        return self

    async def remote(self, status: ReplicaStatus) -> None:
        if self._away:
            raise ActorDiedError()
        self.heard.append(status)


class Replica:
    @says_why_it_fails
    async def __init__(  # Serve awaits it
        self, config: str, ingest: LastWord, monitor: None, group: str | None
    ) -> None:
        self.config = config
        if config == "bad":
            raise ValueError("cannot be served") from MemoryError("no memory")


@pytest.fixture(autouse=True)
def replica_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's, which this process has not."""
    context: Any = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)


@pytest.mark.parametrize("away", [False, True], ids=["ingest there", "ingest away"])
async def test_a_replica_that_cannot_start_reports_why_and_reraises(away, caplog):
    ingest = LastWord(away)
    with pytest.raises(ValueError, match="cannot be served"):
        await Replica.__init__(object.__new__(Replica), "bad", ingest, None)
    reason = "ValueError: cannot be served; caused by MemoryError: no memory"
    assert f"engine replica r1 could not start: {reason}" in caplog.text
    said = [(s.replica_id, s.state, s.version, s.error) for s in ingest.heard]
    assert said == ([] if away else [("r1", "failed", None, reason)])
    assert not tell_errors()


async def test_a_replica_that_starts_reports_no_failure():
    ingest, replica = LastWord(), object.__new__(Replica)
    await Replica.__init__(replica, "good", ingest, None)
    assert replica.config == "good" and ingest.heard == []


class SleepingFleet:
    """Engines sleep for the first ``asked`` questions."""

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.heard: list[bool | None] = []
        """What each report says of memory, and None for each question."""

    async def report(self, status: ReplicaStatus) -> None:
        self.heard.append(status.takes_memory)

    async def until_awake(self) -> bool:
        self.heard.append(None)
        self.asked -= 1
        return self.asked < 0


@pytest.mark.parametrize(
    ("asked", "heard"),
    [(0, [True, None]), (3, [True, None, False, None, None, None, True, None])],
    ids=["awake", "asleep"],
)
async def test_memory_is_taken_once_that_is_reported_and_nobody_sleeps(asked, heard):
    fleet = SleepingFleet(asked)
    announcement = StartupHeartbeat("r1", Ingest(), 0.001)
    await announcement.take_memory(fleet)
    assert fleet.heard == heard and announcement.status().takes_memory
