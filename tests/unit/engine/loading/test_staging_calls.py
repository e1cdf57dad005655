"""What a replica is told by a worker that it has asked to stage a version."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout_service.engine.loading import staging_calls
from rollout_service.engine.loading.staging_calls import StageAnswer, StageCall, StagingServer, stage_at

CALL = StageCall(folder="/log/3", digest="abc")
WAIT_S = 60


@contextmanager
def serving(stage: Callable[[Path, str | None], StageAnswer]) -> Iterator[str]:
    server = StagingServer(stage)
    try:
        yield server.address
    finally:
        server.close()


async def test_the_worker_is_told_what_to_stage_and_its_answer_is_told():
    asked = []
    answers = [
        StageAnswer(refused="too large"),
        StageAnswer(corrupt=("chunk 3 of w\nis not", {"tensor": "w", "chunk": 3})),
        StageAnswer(failed="a message of a whole manifest " * 10_000),
        StageAnswer(failed="IndexError: list index out of range"),
    ]

    def stage(folder: Path, digest: str | None) -> StageAnswer:
        asked.append((folder, digest))
        return answers[:3][len(asked) - 1]  # which fails at last

    with serving(stage) as address:
        for answer in answers:
            assert await stage_at(address, CALL) == answer
    assert asked == [(Path("/log/3"), "abc")] * len(answers)


def test_a_replica_of_ray_serve_asks_by_uvloop():
    uvloop = pytest.importorskip("uvloop")
    with (
        serving(lambda _folder, _digest: StageAnswer(refused="too large")) as address,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert runner.run(stage_at(address, CALL)) == StageAnswer(refused="too large")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(ConnectionRefusedError):
        runner.run(stage_at(address, CALL))


async def test_who_stops_waiting_may_ask_again(caplog):
    asked, go_on = threading.Semaphore(0), threading.Event()

    def stage(folder: Path, digest: str | None) -> StageAnswer:
        asked.release()
        assert go_on.wait(WAIT_S)
        return StageAnswer()

    with serving(stage) as address:
        first = asyncio.create_task(stage_at(address, CALL))
        assert await asyncio.to_thread(asked.acquire, timeout=WAIT_S)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(stage_at(address, CALL))
        assert await asyncio.to_thread(asked.acquire, timeout=WAIT_S)
        go_on.set()
        assert await second == StageAnswer()


async def test_a_worker_that_has_ended_is_an_error():
    with serving(lambda _folder, _digest: StageAnswer()) as address:
        pass
    with pytest.raises(OSError):
        await stage_at(address, CALL)


async def test_a_worker_that_ends_meanwhile_is_an_error(monkeypatch):
    # as if it was killed before it answers
    monkeypatch.setattr(staging_calls._Handler, "handle", lambda handler: handler.rfile.readline())
    with (
        serving(lambda _folder, _digest: StageAnswer()) as address,
        pytest.raises(ConnectionResetError, match="ended while it staged"),
    ):
        await stage_at(address, CALL)


async def test_another_user_is_not_answered(monkeypatch):
    with serving(lambda _folder, _digest: StageAnswer()) as address:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConnectionResetError):
            await stage_at(address, CALL)
