"""How long engines take to start."""

from pathlib import Path

import pytest

from benchmarks.soak.diary import Diary
from benchmarks.soak.engines import EngineStarts


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
