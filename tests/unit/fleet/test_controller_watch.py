"""A controller that answers no call is started anew, and one that answers is left alone."""

from collections.abc import Iterable

import pytest

from rollout_service.fleet.controller_watch import PATIENCE_S, PERIOD_S, watch_controller


class End(Exception):
    """Of the test."""


async def done(answers: Iterable[bool], restart_fails: bool = False) -> list[str]:
    """What the watch did until the answers were used up."""
    did: list[str] = []
    coming = iter(answers)

    async def answer(within_s: float) -> bool:
        assert within_s == PATIENCE_S
        try:
            return next(coming)
        except StopIteration:
            raise End from None

    def restart() -> None:
        did.append("restart")
        if restart_fails:
            raise ValueError("no actor has that name")

    async def sleep(seconds: float) -> None:
        assert seconds == PERIOD_S
        did.append("sleep")

    with pytest.raises(End):
        await watch_controller(answer, restart, sleep)
    return did


async def test_a_controller_that_does_not_answer_is_started_anew():
    assert await done([True, False, True]) == ["sleep", "sleep", "restart", "sleep", "sleep"]


async def test_a_controller_that_is_gone_ends_no_watch():
    assert await done([False, True], restart_fails=True) == ["sleep", "restart", "sleep", "sleep"]
