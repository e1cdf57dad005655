"""Serve's messages, without the traceback inside them; its controller, which is started anew if it hangs."""

import asyncio
import traceback
from collections.abc import Iterable

import pytest

from rollout_service.errors import LONGEST_REASON
from rollout_service.fleet.serve_status import PATIENCE_S, PERIOD_S, ServeMessages, in_short, watch_controller

HEAD = "A replica failed to start with exception. Retrying 2 more time(s). "


def raised() -> str:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            error.add_note("a note of no importance")
            raise ValueError("the log holds another model:\nname another root") from error
    except ValueError as error:
        error.add_note("WorkerProc: MemoryError: nothing left")
        return traceback.format_exc()


def test_the_error_stays_with_all_its_lines_and_notes():
    assert in_short(f"{HEAD}Error:\nray::ServeReplica() (pid=1)\n{raised()}") == (
        f"{HEAD}ValueError: the log holds another model: name another root WorkerProc: MemoryError: nothing left"
    )


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("Resources required for each replica: {'GPU': 1}", "Resources required for each replica: {'GPU': 1}"),
        (f"{HEAD}Error:\nActorDiedError('killed')", f"{HEAD}ActorDiedError('killed')"),
    ],
)
def test_a_message_without_a_traceback_stays_as_it_is(message, short):
    assert in_short(message) == short


def test_a_long_one_is_cut_in_the_middle():
    cut = in_short("begin " + "x" * 10_000 + " end")
    assert cut.startswith("begin") and cut.endswith("end") and len(cut) <= LONGEST_REASON + 3


async def test_many_who_ask_share_one_answer():
    asked, now = list[int](), [100.0]

    def ask() -> dict[str, str]:
        asked.append(1)
        return {"engine": f"message {len(asked)}"}

    messages = ServeMessages(ask, lambda: now[0])
    assert await asyncio.gather(*(messages.read() for _ in range(20))) == 20 * [{"engine": "message 1"}]
    now[0] += 1.5 * ServeMessages.MAX_AGE_S
    assert await messages.read() == {"engine": "message 2"}


class End(Exception):
    """Of the test."""


async def done(answers: Iterable[bool], restart_fails: bool = False) -> list[str]:
    """What the watch did until the answers were used up."""
    did: list[str] = []
    coming = iter(answers)

    async def answer(within_s: float, *, if_gone: bool) -> bool:
        assert within_s == PATIENCE_S and if_gone
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
