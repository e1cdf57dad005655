"""The number of engines: within bounds, monotone in load, and still while versions move."""

from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ray.serve.request_router import ReplicaID

from rollout_service.fleet.autoscaling import (
    BLOCKED,
    Goals,
    Memory,
    ReplicaLoad,
    blocked_starts,
    decide,
    decide_beside_blocked,
    reason_to_hold,
    wanted_replicas,
)

GOALS = Goals(
    min_replicas=1,
    max_replicas=8,
    target_sequences=128,
    target_kv_usage=0.8,
    upscale_delay_s=5,
    downscale_delay_s=600,
)
IDLE = ReplicaLoad(sequences=0, kv_usage=0.0, version=3, serving=True)

sequences = st.floats(0, 1e5)
shares = st.floats(0, 1)
delays = st.floats(0, 1000)


@st.composite
def goals(draw: st.DrawFn) -> Goals:
    low = draw(st.integers(0, 6))
    return Goals(
        min_replicas=low,
        max_replicas=draw(st.integers(max(1, low), 20)),
        target_sequences=draw(st.floats(1, 1000)),
        target_kv_usage=draw(st.floats(0.1, 1)),
        upscale_delay_s=draw(delays),
        downscale_delay_s=draw(delays),
    )


memories = st.builds(
    Memory,
    at_s=st.floats(0, 1000),
    direction=st.sampled_from([-1, 0, 1]),
    lasted_s=delays,
    most_wanted=st.integers(0, 20),
)
loads = st.builds(ReplicaLoad, sequences, shares, st.integers(0, 3), st.booleans())
fleets = st.lists(st.none() | loads, max_size=6)
settled_fleets = st.lists(st.builds(ReplicaLoad, sequences, shares, st.just(3), st.just(True)), min_size=1, max_size=6)


def after(seconds: float, fleet: list[ReplicaLoad], target: int, goals: Goals = GOALS, step_s: float = 1.0) -> int:
    """The target once ``fleet`` has been the same for so long."""
    memory = Memory(at_s=0)
    for tick in range(round(seconds / step_s) + 1):
        target, memory = decide(fleet, target, goals, memory, tick * step_s)
    return target


@dataclass(frozen=True)
class At:
    """A point of a time series."""

    timestamp: float
    value: float


def busy(sequences: float, replicas: int = 1) -> list[ReplicaLoad]:
    return [replace(IDLE, sequences=sequences / replicas) for _ in range(replicas)]


@given(settled_fleets, st.data(), goals(), memories, st.floats(0, 5000))
def test_more_load_never_means_fewer_replicas(fleet, data, goals, memory, now_s):
    target = data.draw(st.integers(goals.min_replicas, goals.max_replicas))
    more = [
        replace(
            load,
            sequences=load.sequences + data.draw(sequences),
            kv_usage=max(load.kv_usage, data.draw(shares)),
        )
        for load in fleet
    ]
    assert wanted_replicas(more, goals) >= wanted_replicas(fleet, goals)
    assert decide(more, target, goals, memory, now_s)[0] >= decide(fleet, target, goals, memory, now_s)[0]


@given(fleets, st.data(), goals(), memories, st.floats(0, 5000))
def test_an_update_pause_or_unknown_replica_holds_the_target(fleet, data, goals, memory, now_s):
    assume(reason_to_hold(fleet) is not None)
    target = data.draw(st.integers(goals.min_replicas, goals.max_replicas))
    decided, remembered = decide(fleet, target, goals, memory, now_s)
    assert decided == target
    assert remembered == replace(memory, at_s=now_s)


@given(settled_fleets, st.integers(1, 20), goals(), memories, st.floats(0, 5000))
def test_the_last_replica_goes_alone(fleet, target, goals, memory, now_s):
    decided, _ = decide(fleet, target, goals, memory, now_s)
    assert decided > 0 or target == 1


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ([], "no replica"),
        ([IDLE, None], "has not said"),
        ([IDLE, replace(IDLE, serving=False)], "paused, syncing"),
        ([IDLE, replace(IDLE, version=4)], "different versions"),
        ([IDLE, IDLE], None),
    ],
)
def test_the_reason_for_holding_is_told(fleet, reason):
    told = reason_to_hold(fleet)
    assert told is None if reason is None else told is not None and reason in told


def test_a_lowered_target_is_not_raised_by_earlier_demand():
    memory = Memory(at_s=0, direction=-1, lasted_s=600, most_wanted=5)
    assert decide(busy(300), 4, GOALS, memory, 1)[0] == 4


def test_a_burst_asks_for_all_the_replicas_it_needs_at_once():
    assert after(4, busy(1000), target=1) == 1
    assert after(5, busy(1000), target=1) == 8
    assert after(5, busy(300), target=1) == 3


def test_a_full_kv_cache_asks_for_more_though_sequences_are_few():
    assert after(5, [replace(IDLE, sequences=4, kv_usage=0.9)], target=1) == 2


def test_shares_that_sum_to_the_target_are_not_rounded_above_it():
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert wanted_replicas([replace(IDLE, kv_usage=0.1)] * 3, replace(GOALS, target_kv_usage=0.3)) == 1


def test_silence_shorter_than_a_trainers_step_costs_no_replica():
    fleet = [IDLE] * 4
    assert after(599, fleet, target=4, step_s=1) == 4
    assert after(600, fleet, target=4, step_s=1) == 1


@pytest.mark.parametrize("busy_second", [0, 590])
def test_as_many_stay_as_were_wanted_at_most_in_the_delay(busy_second):
    target, memory = 4, Memory(at_s=0)
    for second in range(601):
        load = 300 if second == busy_second else 0
        target, memory = decide(busy(load, 4), target, GOALS, memory, second)
    assert target == 3


def test_time_in_an_update_suspends_the_downscale_delay():
    target, memory = 2, Memory(at_s=0)
    for second in range(900):
        rolling = second % 3 == 0
        fleet = [IDLE, replace(IDLE, version=4 if rolling else 3)]
        target, memory = decide(fleet, target, GOALS, memory, second)
        assert target == 2
    assert memory.lasted_s == 599
    assert decide([IDLE, IDLE], target, GOALS, memory, 900)[0] == 1


def test_zero_is_reached_only_if_allowed_and_nothing_is_held():
    to_zero = replace(GOALS, min_replicas=0, downscale_delay_s=10)
    assert after(10, [IDLE], target=1, goals=to_zero) == 0
    assert after(100, busy(1), target=1, goals=to_zero) == 1
    assert after(10, [IDLE, IDLE], target=2, goals=to_zero) == 1


def beside(blocked: int, sequences: float, target: int, goals: Goals = GOALS) -> int:
    """The target after a minute with ``blocked`` of its replicas waiting for a GPU."""
    memory = Memory(at_s=0)
    for second in range(61):
        fleet = busy(sequences, target - blocked)
        target, memory = decide_beside_blocked(fleet, target, blocked, goals, memory, second)
    return target


@given(fleets, st.integers(0, 30), goals(), memories, st.floats(0, 5000))
def test_with_none_blocked_the_decision_is_the_same(fleet, target, goals, memory, now_s):
    expected = decide(fleet, target, goals, memory, now_s)
    assert decide_beside_blocked(fleet, target, 0, goals, memory, now_s) == expected


@given(fleets, st.integers(0, 30), st.integers(0, 30), goals(), memories, st.floats(0, 5000))
def test_a_target_beside_blocked_starts_is_within_bounds(fleet, target, blocked, goals, memory, now_s):
    decided, _ = decide_beside_blocked(fleet, target, min(blocked, target), goals, memory, now_s)
    assert goals.min_replicas <= decided <= goals.max_replicas


def test_another_gpu_is_tried_beside_a_blocked_start():
    assert beside(1, sequences=200, target=2) == 3  # one serves, two are needed
    assert beside(1, sequences=200, target=3) == 3  # two serve
    assert beside(7, sequences=5000, target=8) == 8  # no GPU is left


def test_a_blocked_start_is_stopped_before_a_running_one():
    goals = replace(GOALS, downscale_delay_s=60)
    assert beside(1, sequences=10, target=3, goals=goals) == 1  # the one that waits, and one of two that serve


def test_the_newest_word_on_blocked_starts_counts():
    a, b, gone = (cast(ReplicaID, name) for name in ("a", "b", "gone"))
    metrics = {BLOCKED: {a: [At(1, 2), At(5, 1)], b: [At(2, 3)], gone: [At(9, 4)]}}
    assert blocked_starts(metrics, [a, b], most=3) == 1
    assert blocked_starts(metrics, [b], most=2) == 2
    assert blocked_starts({}, [a], most=2) == 0
