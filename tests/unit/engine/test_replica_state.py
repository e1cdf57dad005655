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


def test_it_serves_a_version_by_number_and_content(life):
    assert life.serves(FIRST)
    assert not life.serves(Head(version=1, digest="other")) and not life.serves(SECOND)
    assert not ReplicaLife().serves(FIRST)


def test_it_serves_nothing_while_a_version_is_loaded(life):
    life.syncs(2)
    life.loads()
    assert not life.serves(FIRST) and life.closed
    life.loaded()
    assert life.serves(FIRST)


def test_a_version_that_cannot_be_loaded_leaves_it_stale(life):
    life.syncs(2)
    assert (life.state, life.target) == ("syncing", 2)
    life.stays("torn")
    assert (life.state, life.target, life.error) == ("stale", None, "torn") and life.serves(FIRST)
    life.ready()
    assert (life.state, life.error) == ("ready", None)


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


def test_one_that_slept_serves_nothing_until_it_has_loaded(life):
    life.sleeps()
    assert (life.state, life.served, life.closed) == ("asleep", None, True)
    life.syncs(1)
    life.stays("torn")
    assert (life.state, life.error) == ("asleep", "torn") and life.closed
    life.sleeps()
    life.syncs(1)
    life.loads()
    life.loaded()
    life.updated(FIRST, TIMINGS)
    assert life.state == "ready" and life.serves(FIRST)
