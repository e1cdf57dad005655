"""A replica that starts is seen while its engine keeps the event loop busy."""

import threading

import pytest
from ray.exceptions import ActorDiedError

from rollout_service.engine.starting import Announcement
from rollout_service.types import ReplicaStatus

LONG_S = 30.0


class Ingest:
    """Keeps reports; handle and answer of a Serve deployment in one."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reports: list[ReplicaStatus] = []
        self.enough = threading.Event()

    @property
    def report(self) -> "Ingest":
        return self

    def remote(self, status: ReplicaStatus) -> "Ingest":
        self.reports.append(status)
        if len(self.reports) >= 3:
            self.enough.set()
        return self

    def result(self, timeout_s: float) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise ActorDiedError()


@pytest.mark.parametrize("failures", [0, 2], ids=["ingest there", "ingest away at first"])
def test_it_reports_from_its_own_thread_until_the_block_ends(failures: int) -> None:
    ingest = Ingest(failures)
    with Announcement("r1", ingest, 0.001) as announcement:
        assert ingest.enough.wait(LONG_S)
    announcement._thread.join(LONG_S)
    assert not announcement._thread.is_alive()
    assert {(s.replica_id, s.state, s.version) for s in ingest.reports} == {("r1", "starting", None)}
    sequences = [status.sequence for status in ingest.reports]
    assert sequences == sorted(set(sequences))


def test_it_says_what_the_follower_says_once_there_is_one() -> None:
    ingest = Ingest()
    with Announcement("r1", ingest, 0.001) as announcement:
        announcement.status = lambda: ReplicaStatus(
            replica_id="r1", sequence=7, version=None, state="syncing", target=4
        )
        ingest.enough.clear()
        ingest.reports.clear()
        assert ingest.enough.wait(LONG_S)
    assert ingest.reports[-1].target == 4
