"""Open sessions: the tree of their turns, their bounds and their end."""

from typing import Any

import pytest

from rollout_service.errors import NotFound, Overloaded, VersionConflict
from rollout_service.protocol.rollout import Span
from rollout_service.protocol.sessions import Message, OpenSession, Turn
from rollout_service.sessions.store import SessionStore
from tests.support.clock import Clock

USER: Message = {"role": "user", "content": "hi"}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turn(reply: str, prompt: tuple[int, ...] = (1,), parent: int | None = None) -> Turn:
    tokens = tuple(ord(character) for character in reply)
    return Turn(
        index=0,
        parent=parent,
        request_id="r",
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=(0.0,) * len(tokens),
        spans=(Span(version=0, start=0, end=len(tokens)),),
        finish_reason="stop",
        truncated_sampling=False,
        message=said(reply),
    )


def store(**options: Any) -> SessionStore:
    made = SessionStore(**options)
    made.open(OpenSession(session_id="s"))
    return made


def test_a_conversation_continues_its_longest_known_part() -> None:
    sessions = store()
    assert sessions.prefix("s", [USER], None) is None
    sessions.add("s", [USER], None, [turn("ab")])
    first = sessions.prefix("s", [USER, said("ab"), USER], None)
    assert first is not None and (first.turn, first.messages, first.token_ids) == (0, 2, (1, 97, 98))
    sessions.add("s", [USER, said("ab"), USER], None, [turn("c", first.token_ids, parent=0)])
    longest = sessions.prefix("s", [USER, said("ab"), USER, said("c"), USER], None)
    assert longest is not None and (longest.turn, longest.messages, longest.token_ids) == (1, 4, (1, 97, 98, 99))


def test_changed_history_begins_a_branch_where_it_changed() -> None:
    sessions = store()
    sessions.add("s", [USER], None, [turn("ab")])
    sessions.add("s", [USER, said("ab"), USER], None, [turn("c", parent=0)])
    changed = sessions.prefix("s", [USER, said("ab"), USER, said("C"), USER], None)
    assert changed is not None and (changed.turn, changed.messages) == (0, 2)
    assert sessions.prefix("s", [USER, said("AB"), USER], None) is None
    sessions.add("s", [USER, said("ab"), USER, said("C"), USER], None, [turn("d", parent=0)])
    assert [[t.index for t in branch] for branch in sessions.get("s").branches()] == [[0, 1], [0, 2]]


def test_each_choice_of_a_reply_can_be_continued() -> None:
    sessions = store()
    sessions.add("s", [USER], None, [turn("a"), turn("b")])
    found = [sessions.prefix("s", [USER, said(text), USER], None) for text in "ab"]
    assert [each.turn for each in found if each is not None] == [0, 1]


def test_a_session_ends_when_nothing_was_said_for_its_time() -> None:
    clock = Clock()
    sessions = SessionStore(clock.monotonic)
    sessions.open(OpenSession(session_id="s", ttl_s=10.0))
    clock.go_on(9.0)
    sessions.prefix("s", [USER], None)
    clock.go_on(9.0)
    sessions.get("s")
    clock.go_on(11.0)
    with pytest.raises(NotFound, match="no session s: it was closed, or nothing was said"):
        sessions.get("s")
    sessions.open(OpenSession(session_id="s"))
    assert len(sessions) == 1


def test_a_closed_session_is_gone_and_its_bytes_are_free() -> None:
    sessions = store(most_bytes=turn("ab").nbytes)
    sessions.add("s", [USER], None, [turn("ab")])
    with pytest.raises(Overloaded, match="DELETE those that are read"):
        sessions.add("s", [USER], None, [turn("a")])
    with pytest.raises(Overloaded, match="DELETE those that are read"):
        sessions.prefix("s", [USER], None)  # before anything is sampled
    sessions.close("s")
    with pytest.raises(NotFound):
        sessions.close("s")
    sessions.open(OpenSession(session_id="s"))
    sessions.add("s", [USER], None, [turn("ab")])


def bytes_of(*turns: Turn) -> int:
    sessions = store()
    for each in turns:
        sessions.add("s", [USER], None, [each])
    return sessions.nbytes


def test_texts_and_tokens_count_and_a_shared_prompt_counts_once() -> None:
    short, long = turn("ab"), turn("ab", tuple(range(1000)))
    assert bytes_of(long) - bytes_of(short) == 4 * 999
    assert bytes_of(turn("a" * 1000)) - bytes_of(turn("a")) >= 999 * (1 + 4 + 8)
    going_on = turn("c", (*long.prompt_token_ids, *long.token_ids, 7), parent=0)
    other = turn("d", (5,), parent=0)  # its prompt does not begin with the parent's
    assert bytes_of(long, going_on) == bytes_of(long, other)
    sessions = store()
    for each in (long, going_on, other):
        sessions.add("s", [USER], None, [each])
    assert sessions.get("s").turns == tuple(
        each.model_copy(update={"index": index}) for index, each in enumerate([long, going_on, other])
    )


def test_turns_of_expired_sessions_make_room() -> None:
    clock = Clock()
    sessions = SessionStore(clock.monotonic, most_bytes=turn("ab").nbytes)
    sessions.open(OpenSession(session_id="old", ttl_s=10.0))
    sessions.open(OpenSession(session_id="s"))
    sessions.add("old", [USER], None, [turn("ab")])
    clock.go_on(10.5)
    sessions.add("s", [USER], None, [turn("ab")])
    assert len(sessions) == 1
    clock.go_on(3600.0)
    sessions.get("s")
    sessions.open(OpenSession(session_id="t", ttl_s=10.0))
    clock.go_on(11.0)
    sessions.get("s")  # any call drops what has expired
    assert len(sessions) == 1


def test_a_long_conversation_is_hashed_once() -> None:
    """Each message once: a chat of many replies must not hold the gateway's event loop."""
    seen: list[str] = []

    class Content(str):
        def encode(self, *arguments: str) -> bytes:
            seen.append(self)
            return super().encode(*arguments)

    sessions = store()
    sessions.add("s", [USER], None, [turn("a")])
    sessions.prefix("s", [{"role": "assistant", "content": Content("a")} for _ in range(500)], None)
    assert len(seen) == 500


def test_names_are_taken_once_and_their_number_is_bounded() -> None:
    sessions = store(most=2)
    with pytest.raises(VersionConflict, match="session s is open"):
        sessions.open(OpenSession(session_id="s"))
    assert sessions.open(OpenSession()) != "s"
    with pytest.raises(Overloaded, match="2 sessions are open"):
        sessions.open(OpenSession())
