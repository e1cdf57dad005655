"""SIGTERM begins a drain, from whichever thread, and the process ends whatever becomes of it."""

import asyncio
import logging
import signal
import sys

import pytest

from rollout_service.errors import NotReady
from rollout_service.runtime.drain import Drain
from tests.support.clock import Clock

LONG_S = 30.0

AS_IN_A_REPLICA = """
import asyncio, signal, sys, threading, time
from rollout_service.runtime import drain

# as Ray does it: the main thread has a handler and is elsewhere, the loop is on another thread
signal.signal(signal.SIGTERM, lambda *_: (print("Ray's handler", flush=True), sys.exit(1)))

async def work():
    print("draining", flush=True)
    {work}

async def serve():
    ending = drain.Drain(timeout_s={timeout_s})
    ending.begin_on_sigterm()
    {serves}
    print("ready", flush=True)
    {then}

threading.Thread(target=asyncio.run, args=[serve()], daemon=True).start()
time.sleep(60)
"""
SERVES = "ending.serves(work)"
FOR_EVER = "await asyncio.sleep(60)"


async def output_after_sigterm(*, ends: bool, signals: int = 1, **script: object) -> tuple[list[str], int | None]:
    """What a process says after it said that it is ready, and its exit status; its first line if it does not end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(
            "-c",
            AS_IN_A_REPLICA.format(**{"timeout_s": 6, "work": "pass", "serves": SERVES, "then": FOR_EVER, **script}),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LONG_S):
            assert await process.stdout.readline() == b"ready\n"
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
            if not ends:
                return [(await process.stdout.readline()).decode().strip()], None
            return (await process.stdout.read()).decode().splitlines(), await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_starts_a_drain_and_ray_s_handler_is_not_called():
    assert await output_after_sigterm(ends=False, work="await asyncio.sleep(60)") == (["draining"], None)


async def test_two_signals_are_one_drain_and_its_end_ends_the_process():
    assert await output_after_sigterm(signals=2, ends=True) == (["draining"], 128 + signal.SIGTERM)


async def test_a_process_whose_work_does_not_end_ends_all_the_same():
    output = await output_after_sigterm(ends=True, timeout_s=3, work="await asyncio.sleep(60)")
    assert output == (["draining"], 128 + signal.SIGTERM)


async def test_a_process_whose_event_loop_is_blocked_ends_too():
    assert await output_after_sigterm(ends=True, timeout_s=0.1, then="time.sleep(60)") == ([], 128 + signal.SIGTERM)


async def test_a_process_that_serves_nobody_yet_ends_at_once():
    assert await output_after_sigterm(ends=True, serves="", then="time.sleep(60)") == ([], 128 + signal.SIGTERM)


async def test_sigterm_ends_a_process_of_serve_at_once():
    output = await output_after_sigterm(ends=True, serves="drain.end_on_sigterm()", then=FOR_EVER)
    assert output == ([], 128 + signal.SIGTERM)


async def test_a_drain_begins_once_and_then_fails_health_checks():
    clock, ran, going = Clock(), [], asyncio.Event()

    async def work() -> None:
        ran.append(drain.left_s)
        await going.wait()

    drain = Drain(45.0, clock.monotonic)
    drain.serves(work)
    drain.check_health()
    assert not drain.begun and drain.left_s == float("inf")
    drain.begin()
    with pytest.raises(NotReady, match="is draining after SIGTERM"):
        drain.check_health()
    clock.go_on(10.0)
    drain.begin()
    await asyncio.sleep(0)
    assert ran == [20.0] and drain.begun and not drain.done
    clock.go_on(30.0)
    assert drain.left_s == 0
    going.set()
    await asyncio.sleep(0)
    assert drain.done


async def test_a_failed_drain_is_logged_and_health_checks_still_fail(caplog):
    async def work() -> None:
        raise OSError("the disk is gone")

    drain = Drain(30.0)
    drain.serves(work)
    with caplog.at_level(logging.ERROR):
        drain.begin()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "the disk is gone" in caplog.text and drain.done
    with pytest.raises(NotReady):
        drain.check_health()
