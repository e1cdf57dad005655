"""How long engines take to start."""

from pathlib import Path

import pytest

from benchmarks.soak.diary import Diary
from benchmarks.soak.engines import EngineStarts


@pytest.fixture
def starts(tmp_path: Path) -> EngineStarts:
    found = EngineStarts("http://127.0.0.1:1", Diary(tmp_path / "diary.jsonl"))
    found.look(0.0, {10: -60.0}, {"first"})
    return found


def seconds(starts: EngineStarts) -> list[float]:
    return [start.seconds for start in starts.starts]


def test_an_engine_has_started_when_a_new_replica_is_ready(starts: EngineStarts) -> None:
    starts.look(5.0, {10: -60.0, 11: 4.5}, {"first"})
    starts.look(20.0, {11: 4.5}, set())  # the ingest does not answer
    starts.look(30.0, {11: 4.5}, {"second"})
    starts.look(31.0, {11: 4.5}, {"second"})
    assert seconds(starts) == [25.5]


def test_an_engine_that_died_while_it_started_does_not_count(starts: EngineStarts) -> None:
    starts.look(5.0, {11: 5.0}, set())
    starts.look(8.0, {12: 8.0}, set())
    starts.look(30.0, {12: 8.0}, {"second"})
    assert seconds(starts) == [22.0]


def test_a_replica_that_is_ready_again_has_not_started_anew(starts: EngineStarts) -> None:
    starts.look(5.0, {10: -60.0}, set())
    starts.look(6.0, {10: -60.0}, {"first"})
    assert seconds(starts) == []


def test_times_without_an_engine_that_has_started_are_noted(starts: EngineStarts) -> None:
    starts.look(5.0, {}, {"first"})  # the ingest has yet to find out
    starts.look(6.0, {11: 5.5}, {"first"})
    starts.look(30.0, {11: 5.5}, {"second"})
    starts.look(40.0, {11: 5.5, 12: 39.0}, {"second"})
    starts.look(50.0, {12: 39.0}, {"second"})
    starts.look(51.0, {12: 39.0}, {"second"})
    assert starts.unserved == [(5.0, 6.0), (50.0, 51.0)]
