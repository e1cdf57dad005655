"""What a run comes to."""

import pytest

from benchmarks.soak.account import Timeline
from benchmarks.soak.engines import EngineStart
from benchmarks.soak.report import is_clean, told_of_blows, told_of_outages, told_of_starts, told_of_waits
from benchmarks.soak.schedule import Signal, Strike
from benchmarks.soak.strike import Blow


def blow(at_s: float, signal: Signal = "SIGKILL", victim: str = "replica", **fields: object) -> Blow:
    return Blow(Strike(1.0, victim, signal, 0.0, 0.0, True), pid=1, at_s=at_s, **fields)  # type: ignore[arg-type]


def test_strikes_are_counted_by_signal_and_victim() -> None:
    blows = [
        blow(1.0, waited=True, whole_s=3.0),
        blow(9.0, "SIGTERM", "ingest", waited=True),
        blow(10.0, "SIGSTOP", "ingest"),
    ]
    assert told_of_blows(blows) == {
        "kills": 3,
        "kills_by_signal": {"SIGKILL": 1, "SIGTERM": 1, "SIGSTOP": 1},
        "kills_by_victim": {"replica": 1, "ingest": 2},
        "not_recovered": 1,
    }


def test_an_outage_is_blamed_on_the_only_strike_in_it() -> None:
    # answers stop at 10 for 5 s after one strike, and at 30 for 9 s in which there are two
    found = Timeline([*range(1, 11), *range(15, 31), *range(39, 51)])
    told = told_of_outages(found, 50.0, [blow(9.5), blow(29.8, "SIGTERM"), blow(35.0), blow(39.5, "SIGSTOP")])
    assert (told["longest_outage_s"], told["longest_outage_from_s"]) == (9.0, 30.0)
    assert told["struck_in_longest_outage"] == ["29.8 s: SIGTERM to replica", "35.0 s: SIGKILL to replica"]
    assert told["longest_outage_by_one_signal_s"] == {"SIGKILL": 5.0, "SIGTERM": 0.0, "SIGSTOP": 0.0}


class TestWaits:
    """Answers stop at 10 for 40 s."""

    found = Timeline([*range(11), *range(50, 61)])

    def test_an_outage_costs_a_start_and_what_was_needed_besides(self) -> None:
        start = EngineStart(14.0, 48.0)
        told = told_of_waits(self.found, 60.0, [blow(10.0)], [start], [(11.0, 48.0)])
        assert told == {"longest_beyond_a_start_s": 6.0, "longest_with_a_live_engine_s": 3.0}

    def test_a_strike_at_an_engine_that_starts_begins_the_wait_anew(self) -> None:
        blows = [blow(10.0), blow(20.0, victim="engine core"), blow(30.0, victim="gateway")]
        told = told_of_waits(self.found, 60.0, blows, [EngineStart(24.0, 48.0)], [(11.0, 48.0)])
        assert told["longest_beyond_a_start_s"] == 6.0

    def test_an_outage_without_a_start_counts_while_an_engine_lived(self) -> None:
        told = told_of_waits(self.found, 60.0, [blow(10.0, victim="proxy")], [EngineStart(1.0, 8.0)], [])
        assert told == {"longest_beyond_a_start_s": 0.0, "longest_with_a_live_engine_s": 40.0}


def test_the_start_of_an_engine_is_the_median_of_all() -> None:
    assert told_of_starts([20.0, 60.0, 30.0]) == {
        "engine_starts": 3,
        "engine_start_s": 30.0,
        "engine_start_max_s": 60.0,
    }
    assert told_of_starts([])["engine_start_s"] is None


CLEAN = {"stale_tokens": 0, "lost_requests": 0, "lost_versions": 0, "not_recovered": 0, "orphans": 0}


@pytest.mark.parametrize("count", CLEAN)
def test_a_run_is_clean_only_if_nothing_was_lost_or_left(count: str) -> None:
    assert is_clean(CLEAN)
    assert not is_clean(CLEAN | {count: 1})
