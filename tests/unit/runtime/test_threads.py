"""What runs in threads of its own, in the order it was given."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_service.runtime import threads
from rollout_service.runtime.threads import compute_threads, in_threads, io_threads, to_thread_and_back

LONG_S = 60.0


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small this machine is."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))


def test_threads_are_counted_where_processes_have_no_affinity(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert (io_threads(), compute_threads()) == (4, 4)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert (io_threads(), compute_threads()) == (1, 1)


@pytest.mark.usefixtures("two_threads")
def test_results_come_in_item_order_whichever_is_done_first():
    last_is_done = threading.Event()

    def square(number: int) -> int:
        if number == 0:
            assert last_is_done.wait(LONG_S)
        if number == 49:
            last_is_done.set()
        return number * number

    assert list(in_threads(square, range(50))) == [number * number for number in range(50)]


@pytest.mark.usefixtures("two_threads")
def test_after_a_failure_nothing_new_begins(monkeypatch):
    given_up = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            given_up.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(threads, "ThreadPoolExecutor", Pool)
    begun = []

    def fail_at_three(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        assert number < 3 or given_up.wait(LONG_S)

    with pytest.raises(ValueError, match="three"):
        list(in_threads(fail_at_three, range(1000)))
    assert set(begun) <= {0, 1, 2, 3, 4, 5}, "both threads were at work when the third failed, and went on"


def test_there_is_a_thread_on_the_smallest_machine(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert io_threads() == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(192)))
    assert io_threads() == 8


async def test_who_is_cancelled_waits_until_the_thread_has_ended():
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(30)
        ended.set()

    waiting = asyncio.create_task(to_thread_and_back(work))
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_what_the_thread_returns_or_raises_comes_back():
    assert await to_thread_and_back(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await to_thread_and_back(divmod, 7, 0)
