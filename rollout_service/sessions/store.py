"""The open sessions, in memory. Their number, their bytes and their idle time are bounded."""

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from rollout_service.errors import NotFound, Overloaded, VersionConflict
from rollout_service.protocol.sessions import (
    CompactTurn,
    Message,
    OpenSession,
    Prefix,
    SessionSnapshot,
    Turn,
    tokens_before,
)
from rollout_service.runtime.rpc import SessionCalls
from rollout_service.sessions.conversation import keys_of, keys_with

MAX_SESSIONS = 65536
MAX_BYTES = 4 << 30
"""Maximum bytes of all turns. A turn with 8000 new prompt tokens and 1000 reply tokens takes about 50 KB."""
_EXPIRE_EVERY_S = 1.0
"""Minimum time in seconds between two searches for expired sessions while calls come."""
_MAX_TURN_S = 24 * 3600.0
"""Maximum time in seconds for which a running turn keeps its session, in case its gateway was killed."""
_EXPIRE_IDLE_S = 60.0
"""Time in seconds after which expired sessions are dropped if no call comes."""


@dataclass
class _Session:
    """An open session."""

    ttl_s: float
    touched: float
    turns: list[CompactTurn] = field(default_factory=list)
    by_conversation: dict[str, int] = field(default_factory=dict)
    """The key of the conversation up to and including a turn's reply, mapped to the turn's index."""
    nbytes: int = 0
    running: int = 0
    """Number of running turns."""

    def is_expired(self, now: float) -> bool:
        """Return True if the last turn ended ``ttl_s`` ago. A turn may wait and run for longer than that."""
        return now - self.touched > (max(self.ttl_s, _MAX_TURN_S) if self.running else self.ttl_s)

    def kept(self, turns: Sequence[Turn]) -> list[CompactTurn]:
        """Return the choices of one reply in compact form. Choices with the same prompt object share its array."""
        kept: list[CompactTurn] = []
        for _, choices in groupby(turns, lambda turn: (id(turn.prompt_token_ids), turn.parent)):
            first, *others = choices
            prefix, prompt = self._new_prompt(first)
            kept.append(CompactTurn.of(first, prefix, prompt, len(prompt)))
            kept += (CompactTurn.of(turn, prefix, prompt, 0) for turn in others)
        return kept

    def _new_prompt(self, turn: Turn) -> "tuple[int | None, array[int]]":
        """Return ``prefix`` and ``prompt`` of a turn's compact form."""
        prompt, parent = array("i", turn.prompt_token_ids), turn.parent
        if parent is None:
            return None, prompt
        shared = tokens_before(self.turns, parent) + self.turns[parent].token_ids
        return (parent, prompt[len(shared) :]) if prompt[: len(shared)] == shared else (None, prompt)


class SessionStore:
    """Stores finished turns, and finds the turn that a conversation continues.

    It runs in the gateway if there is one gateway, else in its own deployment.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_sessions: int = MAX_SESSIONS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock, self._max_sessions, self._max_bytes = clock, max_sessions, max_bytes
        self._open: dict[str, _Session] = {}
        self._nbytes = 0
        self._expired_at = clock()
        self._timer: asyncio.TimerHandle | None = None
        """Runs while sessions are open."""

    async def open(self, wanted: OpenSession) -> str:
        """Open a session and return its id. Raises VersionConflict if the id is in use, Overloaded at the limit."""
        self._expire()
        session_id = wanted.session_id or uuid.uuid4().hex
        if session_id in self._open:
            raise VersionConflict(f"session {session_id} is open: choose another name, or DELETE it first")
        if len(self._open) >= self._max_sessions:
            raise Overloaded(
                f"{len(self._open)} sessions are open, which is the limit: DELETE sessions that you have read"
            )
        self._open[session_id] = _Session(wanted.ttl_s, self._clock())
        if self._timer is None:
            self._expire_later()
        return session_id

    async def num_turns(self, session_id: str) -> int:
        """Return the number of turns of a session. Raises NotFound."""
        return len(self._session(session_id).turns)

    async def prefix(
        self, session_id: str, messages: Sequence[Message], context: object, *, begins_turn: bool = False
    ) -> Prefix | None:
        """Return the longest prefix of ``messages`` that ends with a recorded reply, or None if there is none.

        Raises NotFound. Raises Overloaded before sampling if the store could not take another turn.

        Args:
            context: see ``keys_of``.
            begins_turn: keep the session open until ``end_turn``.
        """
        found = self._session(session_id)
        found.running += begins_turn
        self._require_room(1)
        longest = None
        for count, key in keys_of(messages, context) if found.turns else ():
            index = found.by_conversation.get(key)
            longest = longest if index is None else (count, index)
        if longest is None:
            return None
        count, index = longest
        kept = found.turns[index]
        tokens = tuple(tokens_before(found.turns, index) + kept.token_ids)
        return Prefix(turn=index, messages=count, token_ids=tokens, stop_reason=kept.stop_reason)

    async def end_turn(self, session_id: str) -> None:
        """End a turn that ``prefix`` has begun, whether it was recorded or failed. Raises NotFound."""
        found = self._session(session_id)
        found.running = max(0, found.running - 1)

    async def add(self, session_id: str, messages: Sequence[Message], context: object, turns: Sequence[Turn]) -> None:
        """Record the choices of one reply to ``messages``. Raises NotFound, or Overloaded if they exceed the limit."""
        found = self._session(session_id)
        kept = found.kept(turns)
        nbytes = sum(each.nbytes for each in kept)
        self._require_room(nbytes)
        keys = keys_with(messages, (turn.message for turn in turns), context)
        found.by_conversation.update((key, index) for index, key in enumerate(keys, len(found.turns)))
        found.turns += kept
        found.nbytes += nbytes
        self._nbytes += nbytes

    async def get(self, session_id: str) -> SessionSnapshot:
        """Return the turns so far. Raises NotFound."""
        return SessionSnapshot(tuple(self._session(session_id).turns))

    async def close(self, session_id: str) -> None:
        """Delete a session. Raises NotFound."""
        self._session(session_id)
        self._nbytes -= self._open.pop(session_id).nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of all turns of all sessions."""
        return self._nbytes

    @property
    def num_open(self) -> int:
        """The number of open sessions."""
        return len(self._open)

    def _session(self, session_id: str) -> _Session:
        found, now = self._open.get(session_id), self._clock()
        if now - self._expired_at >= _EXPIRE_EVERY_S:
            self._expire()
        if found is None or found.is_expired(now):
            raise NotFound(
                f"there is no session {session_id}: it was deleted, or ttl_s passed without a turn; open a new one"
            )
        found.touched = now
        return found

    def _require_room(self, nbytes: int) -> None:
        if self._nbytes + nbytes > self._max_bytes:
            self._expire()
        if self._nbytes + nbytes > self._max_bytes:
            raise Overloaded(
                f"the open sessions hold {self._nbytes} bytes of at most {self._max_bytes}: DELETE some of them"
            )

    def _expire(self) -> None:
        self._expired_at = now = self._clock()
        expired = [name for name, session in self._open.items() if session.is_expired(now)]
        for name in expired:
            self._nbytes -= self._open.pop(name).nbytes

    def _expire_later(self) -> None:
        self._expire()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_EXPIRE_IDLE_S, self._expire_later) if self._open else None


if TYPE_CHECKING:
    _: type[SessionCalls] = SessionStore  # mypy: gateways call these methods
