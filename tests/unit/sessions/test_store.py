"""Open sessions: the tree of their turns, their bounds and their end."""

import asyncio
import pickle
from typing import Any

import pytest

from rollout_service.errors import NotFound, Overloaded, VersionConflict
from rollout_service.protocol.rollout import Span
from rollout_service.protocol.sessions import Message, OpenSession, Turn
from rollout_service.sessions.store import SessionStore
from tests.support.clock import Clock
from tests.support.virtual_time import run_in_virtual_time

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


async def store(**options: Any) -> SessionStore:
    made = SessionStore(**options)
    await made.open(OpenSession(session_id="s"))
    return made


async def test_a_conversation_continues_its_longest_known_part():
    sessions = await store()
    assert await sessions.prefix("s", [USER], None) is None
    await sessions.add("s", [USER], None, [turn("ab")])
    first = await sessions.prefix("s", [USER, said("ab"), USER], None)
    assert first is not None and (first.turn, first.messages, first.token_ids) == (0, 2, (1, 97, 98))
    await sessions.add("s", [USER, said("ab"), USER], None, [turn("c", first.token_ids, parent=0)])
    longest = await sessions.prefix("s", [USER, said("ab"), USER, said("c"), USER], None)
    assert longest is not None and (longest.turn, longest.messages, longest.token_ids) == (1, 4, (1, 97, 98, 99))


async def test_changed_history_begins_a_branch_where_it_changed():
    sessions = await store()
    await sessions.add("s", [USER], None, [turn("ab")])
    await sessions.add("s", [USER, said("ab"), USER], None, [turn("c", parent=0)])
    changed = await sessions.prefix("s", [USER, said("ab"), USER, said("C"), USER], None)
    assert changed is not None and (changed.turn, changed.messages) == (0, 2)
    assert await sessions.prefix("s", [USER, said("AB"), USER], None) is None
    await sessions.add("s", [USER, said("ab"), USER, said("C"), USER], None, [turn("d", parent=0)])
    assert list((await sessions.get("s")).paths()) == [(0, 1), (0, 2)]


async def test_each_choice_of_a_reply_can_be_continued():
    sessions = await store()
    await sessions.add("s", [USER], None, [turn("a"), turn("b")])
    found = [await sessions.prefix("s", [USER, said(text), USER], None) for text in "ab"]
    assert [each.turn for each in found if each is not None] == [0, 1]


async def test_a_session_ends_when_nothing_was_said_for_its_time():
    clock = Clock()
    sessions = SessionStore(clock.monotonic)
    await sessions.open(OpenSession(session_id="s", ttl_s=10.0))
    clock.go_on(9.0)
    await sessions.prefix("s", [USER], None)
    clock.go_on(9.0)
    await sessions.get("s")
    clock.go_on(11.0)
    with pytest.raises(NotFound, match="no session s: it was deleted, or ttl_s passed"):
        await sessions.get("s")
    await sessions.open(OpenSession(session_id="s"))
    assert sessions.num_open == 1


async def test_a_closed_session_is_gone_and_its_bytes_are_free():
    sessions = await store(max_bytes=turn("ab").nbytes)
    await sessions.add("s", [USER], None, [turn("ab")])
    with pytest.raises(Overloaded, match="DELETE some"):
        await sessions.add("s", [USER], None, [turn("a")])
    with pytest.raises(Overloaded, match="DELETE some"):
        await sessions.prefix("s", [USER], None)  # before anything is sampled
    await sessions.close("s")
    with pytest.raises(NotFound):
        await sessions.close("s")
    await sessions.open(OpenSession(session_id="s"))
    await sessions.add("s", [USER], None, [turn("ab")])


async def bytes_of(*turns: Turn) -> int:
    sessions = await store()
    for each in turns:
        await sessions.add("s", [USER], None, [each])
    return sessions.nbytes


async def test_texts_and_tokens_count_and_a_shared_prompt_counts_once():
    short, long = turn("ab"), turn("ab", tuple(range(1000)))
    assert await bytes_of(long) - await bytes_of(short) == 4 * 999
    assert await bytes_of(turn("a" * 1000)) - await bytes_of(turn("a")) >= 999 * (1 + 4 + 8)
    going_on = turn("c", (*long.prompt_token_ids, *long.token_ids, 7), parent=0)
    other = turn("d", (5,), parent=0)  # its prompt does not begin with the parent's
    assert await bytes_of(long, going_on) == await bytes_of(long, other)
    sessions = await store()
    for each in (long, going_on, other):
        await sessions.add("s", [USER], None, [each])
    read = await sessions.get("s")
    for index, each in enumerate([long, going_on, other]):
        assert read.turn(index) == each.model_copy(update={"index": index})
    assert list(read.paths()) == [(0, 1), (0, 2)]


@pytest.mark.parametrize("parent", [None, 0])
async def test_choices_of_a_reply_share_its_prompt(parent):
    first = turn("ab")
    prompt = (*first.prompt_token_ids, *first.token_ids, *range(1000))
    sessions = await store()
    await sessions.add("s", [USER], None, [first])
    choices = [turn(text, parent=parent).model_copy(update={"prompt_token_ids": prompt}) for text in "cde"]
    alone = sum([await bytes_of(first, choice) - first.nbytes for choice in choices])
    await sessions.add("s", [USER], None, choices)
    new_tokens = len(prompt) if parent is None else 1000
    assert sessions.nbytes - first.nbytes == alone - 2 * 4 * new_tokens
    read = await sessions.get("s")
    assert [read.turn(index).prompt_token_ids for index in (1, 2, 3)] == [prompt] * 3


async def test_turns_of_expired_sessions_make_room():
    clock = Clock()
    sessions = SessionStore(clock.monotonic, max_bytes=turn("ab").nbytes)
    await sessions.open(OpenSession(session_id="old", ttl_s=10.0))
    await sessions.open(OpenSession(session_id="s"))
    await sessions.add("old", [USER], None, [turn("ab")])
    clock.go_on(10.5)
    await sessions.add("s", [USER], None, [turn("ab")])
    assert sessions.num_open == 1
    clock.go_on(3600.0)
    await sessions.get("s")
    await sessions.open(OpenSession(session_id="t", ttl_s=10.0))
    clock.go_on(11.0)
    await sessions.get("s")  # any call drops what has expired
    assert sessions.num_open == 1


def test_sessions_expire_though_no_call_comes():
    async def program() -> None:
        sessions = SessionStore(asyncio.get_running_loop().time)
        for name, ttl_s in (("s", 10.0), ("t", 100.0)):
            await sessions.open(OpenSession(session_id=name, ttl_s=ttl_s))
            await sessions.add(name, [USER], None, [turn("ab")])
        for num_open in (2, 1, 0):
            assert (sessions.num_open, sessions.nbytes) == (num_open, num_open * turn("ab").nbytes)
            await asyncio.sleep(61.0)
        await sessions.open(OpenSession(ttl_s=10.0))
        await asyncio.sleep(61.0)
        assert sessions.num_open == 0

    run_in_virtual_time(program())


async def test_gateways_get_shared_tokens_of_a_session_once():
    sessions, prompt = await store(), tuple[int, ...]((1,))
    for index in range(64):
        each = turn("a" * 64, prompt, parent=index - 1 if index else None)
        await sessions.add("s", [USER], None, [each])
        prompt = (*prompt, *each.token_ids)
    sent = pickle.dumps(await sessions.get("s"))
    assert len(sent) < sessions.nbytes
    received = pickle.loads(sent)
    assert received.turn(63).prompt_token_ids == (1, *[97] * 64 * 63) and received == await sessions.get("s")


@pytest.mark.parametrize("call", ["prefix", "add"])
async def test_a_long_conversation_is_hashed_once(call):
    """Each message once: a chat of many replies or choices must not hold the gateway's event loop."""
    seen: list[str] = []

    class Content(str):
        def encode(self, *arguments: str) -> bytes:
            seen.append(self)
            return super().encode(*arguments)

    sessions = await store()
    await sessions.add("s", [USER], None, [turn("a")])
    messages: list[Message] = [{"role": "assistant", "content": Content("a")} for _ in range(500)]
    if call == "prefix":
        await sessions.prefix("s", messages, None)
    else:
        await sessions.add("s", messages, None, [turn("b"), turn("c"), turn("d")])
    assert len(seen) == 500


async def test_names_are_taken_once_and_their_number_is_bounded():
    sessions = await store(max_sessions=2)
    with pytest.raises(VersionConflict, match="session s is open"):
        await sessions.open(OpenSession(session_id="s"))
    assert await sessions.open(OpenSession()) != "s"
    with pytest.raises(Overloaded, match="2 sessions are open"):
        await sessions.open(OpenSession())
