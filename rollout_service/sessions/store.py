"""The open sessions, in memory: bounded by number, by bytes and by the time since their last turn."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout_service.errors import NotFound, Overloaded, VersionConflict
from rollout_service.protocol.sessions import Message, OpenSession, Prefix, Session, Turn
from rollout_service.rpc import SessionCalls
from rollout_service.sessions.conversation import key_of

MOST_SESSIONS = 65536
MOST_BYTES = 4 << 30
"""Of all turns. A turn of 8000 tokens of prompt and 1000 of reply counts 80 KB."""


@dataclass
class _Open:
    ttl_s: float
    touched: float
    turns: list[Turn] = field(default_factory=list)
    by_conversation: dict[str, int] = field(default_factory=dict)
    """What was said up to and with a turn's reply → the turn."""

    @property
    def nbytes(self) -> int:
        return sum(turn.nbytes for turn in self.turns)


class SessionStore:
    """Keeps turns as they end, and finds the one that a conversation continues."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most: int = MOST_SESSIONS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._clock, self._most, self._most_bytes = clock, most, most_bytes
        self._open: dict[str, _Open] = {}
        self._nbytes = 0

    def open(self, wanted: OpenSession) -> str:
        """Its id. Raises VersionConflict if it is open, Overloaded if there are too many."""
        self._expire()
        session_id = wanted.session_id or uuid.uuid4().hex
        if session_id in self._open:
            raise VersionConflict(f"session {session_id} is open: choose another name, or DELETE it first")
        if len(self._open) >= self._most:
            raise Overloaded(f"{len(self._open)} sessions are open, which is the limit: DELETE those that are read")
        self._open[session_id] = _Open(wanted.ttl_s, self._clock())
        return session_id

    def num_turns(self, session_id: str) -> int:
        """Return the number of its turns. Raises NotFound."""
        return len(self._session(session_id).turns)

    def prefix(self, session_id: str, messages: Sequence[Message], context: object) -> Prefix | None:
        """The longest part of a conversation that is a turn's with its reply; None: it continues none.

        Raises NotFound.
        """
        found = self._session(session_id)
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") != "assistant":
                continue
            index = found.by_conversation.get(key_of(messages[:count], context))
            if index is not None:
                turn = found.turns[index]
                return Prefix(
                    turn=index,
                    messages=count,
                    token_ids=turn.prompt_token_ids + turn.token_ids,
                    stop_reason=turn.stop_reason,
                )
        return None

    def add(self, session_id: str, messages: Sequence[Message], context: object, turns: Sequence[Turn]) -> None:
        """The choices of one reply to ``messages``. Raises NotFound, or Overloaded if they do not fit."""
        found = self._session(session_id)
        nbytes = sum(turn.nbytes for turn in turns)
        if self._nbytes + nbytes > self._most_bytes:
            raise Overloaded(
                f"the open sessions hold {self._nbytes} bytes of at most {self._most_bytes}: DELETE those that are read"
            )
        for turn in turns:
            index = len(found.turns)
            found.turns.append(turn.model_copy(update={"index": index}))
            found.by_conversation[key_of([*messages, turn.message], context)] = index
        self._nbytes += nbytes

    def get(self, session_id: str) -> Session:
        """What was said so far. Raises NotFound."""
        return Session.of(session_id, self._session(session_id).turns)

    def close(self, session_id: str) -> None:
        """Forget it. Raises NotFound."""
        self._session(session_id)
        self._nbytes -= self._open.pop(session_id).nbytes

    def __len__(self) -> int:
        return len(self._open)

    def _session(self, session_id: str) -> _Open:
        found, now = self._open.get(session_id), self._clock()
        if found is None or now - found.touched > found.ttl_s:
            raise NotFound(f"there is no session {session_id}: it was closed, or nothing was said for its ttl_s")
        found.touched = now
        return found

    def _expire(self) -> None:
        now = self._clock()
        late = [name for name, session in self._open.items() if now - session.touched > session.ttl_s]
        for name in late:
            self._nbytes -= self._open.pop(name).nbytes


class Sessions:
    """The store, called as other processes call it: in the gateway if there is one, else in a deployment of its own."""

    def __init__(self) -> None:
        self._store = SessionStore()

    async def open(self, wanted: OpenSession) -> str:
        """See ``SessionStore``."""
        return self._store.open(wanted)

    async def num_turns(self, session_id: str) -> int:
        """See ``SessionStore``."""
        return self._store.num_turns(session_id)

    async def prefix(self, session_id: str, messages: Sequence[Message], context: object) -> Prefix | None:
        """See ``SessionStore``."""
        return self._store.prefix(session_id, messages, context)

    async def add(self, session_id: str, messages: Sequence[Message], context: object, turns: Sequence[Turn]) -> None:
        """See ``SessionStore``."""
        self._store.add(session_id, messages, context, turns)

    async def get(self, session_id: str) -> Session:
        """See ``SessionStore``."""
        return self._store.get(session_id)

    async def close(self, session_id: str) -> None:
        """See ``SessionStore``."""
        self._store.close(session_id)


if TYPE_CHECKING:
    _: type[SessionCalls] = Sessions  # its methods are what gateways call
