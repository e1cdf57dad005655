"""A replica's life: what may follow what, and what it says meanwhile."""

import pytest

from rollout_service.engine.replica_state import NEXT, ReplicaLife
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.weight_log import Head

FIRST, SECOND = Head(version=1, digest="a"), Head(version=2, digest="b")
TIMINGS = UpdateTimings(stage_s=1.0, closed_s=0.5, load_s=0.25)


@pytest.fixture
def life() -> ReplicaLife:
    """Of a replica that serves version 1."""
    life = ReplicaLife()
    life.syncs(1)
    life.updated(FIRST, TIMINGS)
    return life


def test_it_serves_nothing_while_a_version_is_loaded(life):
    life.syncs(2)
    life.loads()
    assert not life.serves(FIRST) and life.closed
    life.loaded()
    assert life.serves(FIRST)


def test_a_closed_engine_is_not_called_stale(life):
    life.syncs(2)
    life.loads()
    life.stays("torn")
    assert life.state == "syncing" and life.closed


def test_what_may_not_follow_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="starting does not become ready"):
        ReplicaLife().ready()


def test_every_state_can_reach_ready():
    reached = {"ready"}
    while more := {state for state, after in NEXT.items() if after & reached} - reached:
        reached |= more
    assert reached == set(NEXT)
