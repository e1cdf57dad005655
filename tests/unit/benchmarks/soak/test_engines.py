"""When no engine lived, from what was seen of the processes."""

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.soak import engines
from benchmarks.soak.account import Diary
from benchmarks.soak.engines import EngineStarts


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A shell that plays the engine core of this process, with its child as the worker."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        core = psutil.Process(shell.pid)
        [worker] = core.children()
        seen = {"replica": [psutil.Process()], "engine core": [core], "vllm worker": [worker]}
        monkeypatch.setattr(engines, "victims", lambda: seen)
        yield core
        for process in (worker, core):
            process.kill()


@pytest.mark.parametrize("struck", ["engine core", "vllm worker"])
def test_an_engine_with_a_stopped_process_or_one_told_to_end_is_not_live(core, struck, tmp_path):
    ending = set[int]()
    starts = EngineStarts("", Diary(tmp_path / "diary.jsonl"), lambda: ending)
    made, live = starts._processes()
    assert made.keys() == live == {psutil.Process().pid}
    process = core if struck == "engine core" else core.children()[0]
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass
    assert starts._processes()[1] == set()
    process.resume()
    while process.status() == psutil.STATUS_STOPPED:
        pass
    assert starts._processes()[1] == live
    ending.add(process.pid)
    assert starts._processes()[1] == set()


def test_times_without_a_live_engine_are_joined(tmp_path):
    starts = EngineStarts("", Diary(tmp_path / "diary.jsonl"), set)
    starts.look(0.0, {1: -60.0, 2: -60.0}, {"a", "b"}, live={1, 2})
    starts.look(1.0, {1: -60.0, 2: -60.0}, {"a", "b"}, live={2})
    starts.look(2.0, {1: -60.0, 2: -60.0}, {"a", "b"}, live=set())
    starts.look(3.0, {3: 2.5}, set(), live={3})  # it starts
    starts.look(9.0, {3: 2.5}, {"c"}, live={3})
    assert starts.unserved == [(2.0, 3.0)]
    assert [(start.from_s, start.ready_s) for start in starts.starts] == [(2.5, 9.0)]
