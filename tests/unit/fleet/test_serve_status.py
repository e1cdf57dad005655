"""Serve's messages, without the traceback inside them."""

import traceback

import pytest

from rollout_service.errors import LONGEST_REASON
from rollout_service.fleet.serve_status import in_short

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
