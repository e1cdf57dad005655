"""What runs in threads of its own, in the order it was given."""

import time

import pytest

from rollout_service.threads import in_threads, io_threads


def test_results_come_in_the_order_of_the_items_whichever_is_done_first() -> None:
    def square(number: int) -> int:
        if number == 0:
            time.sleep(0.05)
        return number * number

    assert list(in_threads(square, range(50))) == [number * number for number in range(50)]


def test_after_a_failure_nothing_new_begins() -> None:
    begun = []

    def fail_at_three(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="three"):
        list(in_threads(fail_at_three, range(10_000)))
    assert len(begun) < 10_000


def test_there_is_a_thread_on_the_smallest_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert io_threads() == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(192)))
    assert io_threads() == 8
