"""The soak's seeded strikes, and what it makes of what happened."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from benchmarks.soak import strike as strike_module
from benchmarks.soak.account import Outage, Timeline, Versions
from benchmarks.soak.diary import Diary
from benchmarks.soak.engines import EngineStarts
from benchmarks.soak.report import is_clean, told_of_blows, told_of_outages, told_of_starts, with_case
from benchmarks.soak.schedule import LONGEST_PAUSE_S, LONGEST_STOP_S, SIGNALS, TITLES, Signal, Strike, strikes
from benchmarks.soak.strike import Blow, Striker, alive

# --- the schedule


def test_a_seed_always_gives_the_same_strikes_and_another_one_others() -> None:
    first, again, other = (list(islice(strikes(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_victim_gets_every_signal_and_some_strikes_come_on_top_of_others() -> None:
    drawn = list(islice(strikes(3), 1000))
    assert {(strike.victim, strike.signal) for strike in drawn} == {(v, s) for v in TITLES for s in SIGNALS}
    assert 0.7 < sum(strike.waits for strike in drawn) / len(drawn) < 0.8
    for strike in drawn:
        assert 0 <= strike.pause_s <= LONGEST_PAUSE_S and 0 <= strike.pick < 1
        assert (0 < strike.stopped_s <= LONGEST_STOP_S) == (strike.signal == "SIGSTOP")


# --- time without service


def timeline(*answers: float) -> Timeline:
    found = Timeline()
    for at in answers:
        found.answered(at)
    return found


def test_the_longest_outage_is_the_longest_gap_between_answers() -> None:
    found = timeline(0.1, 0.2, 5.2, 5.3, 7.3)
    assert found.longest(7.4) == Outage(0.2, pytest.approx(5.0))
    assert found.outages(7.4, longer_than_s=1.5) == [
        Outage(0.2, pytest.approx(5.0)),
        Outage(5.3, pytest.approx(2.0)),
    ]


def test_answers_that_overtake_one_another_leave_no_gap() -> None:
    assert timeline(0.1, 0.9, 0.3, 0.5, 0.7).longest(1.0).seconds == pytest.approx(0.2)


def test_a_service_that_does_not_come_back_is_away_until_the_end() -> None:
    assert timeline(0.1).longest(60.0) == Outage(0.1, pytest.approx(59.9))
    assert timeline(50.0).longest(60.0) == Outage(0.0, 50.0)


def test_without_an_answer_there_was_never_service() -> None:
    assert timeline().longest(60.0) == Outage(0.0, 60.0)


def test_an_answer_after_the_end_counts_for_nothing() -> None:
    assert timeline(1.0, 99.0).longest(10.0) == Outage(1.0, 9.0)


# --- versions


def test_a_version_older_than_the_newest_of_the_log_is_not_lost() -> None:
    found = Versions()
    for version in (1, 2, 3):
        found.said(version)
    assert found.found(3) == set() and found.found(4) == set()
    assert found.newest == 3


def test_versions_that_the_log_has_no_more_are_lost_once_whatever_comes_after_them() -> None:
    found = Versions()
    for version in (1, 2, 3):
        found.said(version)
    assert found.found(1) == {2, 3}
    assert found.found(1) == set()
    found.said(4)
    assert found.found(4) == set() and found.lost == {2, 3}
    assert found.found(-1) == {1, 4}


# --- how long engines take to start


@pytest.fixture
def starts(tmp_path: Path) -> EngineStarts:
    found = EngineStarts("http://127.0.0.1:1", Diary(tmp_path / "diary.jsonl"))
    found.look(0.0, {10}, {"first"})
    return found


def test_an_engine_has_started_when_a_new_replica_is_ready(starts: EngineStarts) -> None:
    starts.look(5.0, {10, 11}, {"first"})
    starts.look(20.0, {11}, set())  # the ingest does not answer
    starts.look(30.0, {11}, {"second"})
    starts.look(31.0, {11}, {"second"})
    assert starts.seconds == [25.0]


def test_an_engine_that_died_while_it_started_does_not_count(starts: EngineStarts) -> None:
    starts.look(5.0, {11}, set())
    starts.look(8.0, {12}, set())
    starts.look(30.0, {12}, {"second"})
    assert starts.seconds == [22.0]


def test_a_replica_that_is_ready_again_has_not_started_anew(starts: EngineStarts) -> None:
    starts.look(5.0, {10}, set())
    starts.look(6.0, {10}, {"first"})
    assert starts.seconds == []


# --- the result


def blow(at_s: float, signal: Signal = "SIGKILL", victim: str = "replica", **fields: object) -> Blow:
    return Blow(Strike(1.0, victim, signal, 0.0, 0.0, True), pid=1, at_s=at_s, **fields)  # type: ignore[arg-type]


def test_strikes_are_counted_and_those_that_were_not_recovered_from() -> None:
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


def test_an_outage_names_what_was_struck_in_it_and_only_one_strike_alone_is_blamed() -> None:
    # answers stop at 10 for 5 s after one strike, and at 30 for 9 s in which there are two
    found = timeline(*range(1, 11), *range(15, 31), *range(39, 51))
    told = told_of_outages(found, 50.0, [blow(9.5), blow(29.8, "SIGTERM"), blow(35.0), blow(39.5, "SIGSTOP")])
    assert (told["longest_outage_s"], told["longest_outage_from_s"]) == (9.0, 30.0)
    assert told["struck_in_longest_outage"] == ["29.8 s: SIGTERM to replica", "35.0 s: SIGKILL to replica"]
    assert told["longest_outage_by_one_signal_s"] == {"SIGKILL": 5.0, "SIGTERM": 0.0, "SIGSTOP": 0.0}


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


def test_a_case_replaces_that_of_its_seed_and_no_other() -> None:
    earlier = [{"seed": 1, "kills": 3}, {"seed": 2, "kills": 4}]
    assert with_case(earlier, {"seed": 1, "kills": 9}) == [{"seed": 1, "kills": 9}, {"seed": 2, "kills": 4}]
    assert [case["seed"] for case in with_case(earlier, {"seed": 0})] == [0, 1, 2]


def test_the_diary_has_a_line_for_each_event_as_soon_as_it_is_noted(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "out" / "diary.jsonl")
    diary.note("strike", victim="ingest", pid=7)
    diary.note("whole again", after_s=1.5)
    events = [json.loads(line) for line in diary.path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["strike", "whole again"]
    assert events[0]["victim"] == "ingest" and events[1]["at_s"] >= events[0]["at_s"] >= 0
    diary.close()


# --- real processes


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A process that plays the ingest; the others are this one."""
    with subprocess.Popen(["sleep", "600"]) as process:
        victim = psutil.Process(process.pid)
        kinds = {name: [victim if name == "ingest" else psutil.Process()] for name in TITLES}
        monkeypatch.setattr(strike_module, "victims", lambda: kinds)
        yield victim
        process.kill()


def on_ingest(signal: Signal, stopped_s: float = 0.0, waits: bool = False) -> Strike:
    return Strike(0.0, "ingest", signal, stopped_s, 0.5, waits)


async def test_what_was_stopped_goes_on_when_all_is_let_go_on(victim: psutil.Process, tmp_path: Path) -> None:
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: "")
    assert await striker.once(on_ingest("SIGSTOP", stopped_s=3600.0)) is not None
    while victim.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    striker.let_all_go_on()
    while victim.status() == psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    assert alive(victim)


async def test_a_killed_process_must_be_gone_and_the_service_served(victim: psutil.Process, tmp_path: Path) -> None:
    lacking = iter(["version 3 is waited for", ""])
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: next(lacking))
    found = await striker.once(on_ingest("SIGKILL", waits=True))
    assert found is not None and found.whole_s is not None and not alive(victim)
    assert next(lacking, None) is None


async def test_a_process_that_lives_on_after_sigterm_is_named(
    victim: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strike_module, "BACK_S", 0.0)
    monkeypatch.setattr(strike_module, "send", lambda process, signal: None)  # as one that ignores it
    striker = Striker(Diary(tmp_path / "diary.jsonl"), lambda: lambda: "")
    found = await striker.once(on_ingest("SIGTERM", waits=True))
    assert found is not None and found.whole_s is None
    assert found.missing == f"process {victim.pid} has not ended"
