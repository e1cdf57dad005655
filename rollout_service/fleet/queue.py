"""Queue of one gateway's calls that wait until a replica has room for them.

Calls leave in vLLM's order: the lowest ``priority`` first, then the earliest arrival. All calls of a session have the
arrival of its first one, so sessions that have begun go before new ones. A replica with room for one sequence takes a
call of any ``n``, so calls with a large ``n`` never wait for more room than others.

The state that replicas publish is seconds old, so a replica may refuse a call that has left the queue. Such a call
keeps its place in the order. It waits until the fleet changes, or another call ends and frees its room. The same holds
for a session's call that must wait for memory (``engine/admission.py``); calls of others may run first.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout_service.errors import Overloaded
from rollout_service.runtime.recent import remember

MAX_SEQUENCES = 500_000
"""Maximum number of sequences that may wait in one gateway."""
MAX_BYTES = 4 << 30
"""Maximum estimated memory in bytes of the calls that may wait in one gateway."""
RETRY_S = 0.25
"""Time in seconds after which a few refused calls are sent again without an event, in case the router missed an
update."""
RETRIED_CALLS = 16
"""Number of calls that are sent again after that time."""
MAX_SESSIONS = 100_000
"""Maximum number of sessions whose arrival is remembered; the least recently used one is dropped."""

CallLater = Callable[[float, Callable[[], None]], object]
"""Calls a function after that many seconds."""


@dataclass
class Ticket:
    """A place in the order of all calls. The continuations of a call share the call's ticket."""

    priority: int
    arrival: int
    was_sent: bool = False
    """True once a replica was asked to take the call: the bounds of the queue no longer apply to it."""


@dataclass(order=True)
class Turn:
    """One call that waits for its turn, or has it."""

    key: tuple[int, ...]
    sequences: int = field(compare=False)
    nbytes: int = field(compare=False)
    begun: asyncio.Future[None] = field(compare=False)
    was_refused: bool = field(default=False, compare=False)
    """Set by the caller: every replica has refused the call."""
    is_full: bool = field(default=False, compare=False)
    """Set by the caller: every replica has refused the call because it has no room."""


class DispatchQueue:
    """Releases calls in order while there is room."""

    def __init__(
        self,
        room: Callable[[], int],
        max_sequences: int = MAX_SEQUENCES,
        max_bytes: int = MAX_BYTES,
        later: CallLater | None = None,
    ) -> None:
        """
        Args:
            room: Returns the number of sequences that the fleet may hold for this gateway.
            max_sequences, max_bytes: Bounds on the calls that wait.
            later: Replaces the event loop's ``call_later``.
        """
        self._room, self._max_sequences, self._max_bytes, self._later = room, max_sequences, max_bytes, later
        self._arrivals, self._order = itertools.count(), itertools.count()
        self._ready: list[Turn] = []
        self._refused: list[Turn] = []
        self._no_memory: list[Turn] = []
        """Turns of sessions that were refused for want of KV-cache memory."""
        self._left = 0
        """Number of turns in these lists whose callers have left."""
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """Session → its arrival."""
        self._is_full = False
        """True after replicas reported that they are full, until the router has newer information."""
        self._retrying = False
        self._calls_sent = self._sequences_sent = 0
        self.sequences = 0
        """Number of waiting sequences."""
        self.nbytes = 0
        """Estimated memory of the waiting calls in bytes."""

    def ticket(self, priority: int, session: str | None = None) -> Ticket:
        """Return the place of a call that arrives now: that of the first call of its session."""
        arrival = next(self._arrivals)
        if session is not None:
            arrival = self._sessions.get(session, arrival)
            remember(self._sessions, session, arrival, MAX_SESSIONS)
        return Ticket(priority, arrival)

    @asynccontextmanager
    async def turn(
        self, ticket: Ticket, sequences: int, nbytes: int, rounds: int = 0, *, lacks_memory: bool = False
    ) -> AsyncIterator[Turn]:
        """Wait for the turn of a call, and hold its room until the block ends.

        A cancelled call leaves the queue at once.

        Args:
            ticket: Place of the call.
            sequences: Number of its completions.
            nbytes: Estimated memory of the call in bytes.
            rounds: Number of times that every replica has refused the call. Above 0 it first waits for a change.
            lacks_memory: The last refusal was for want of KV-cache memory.

        Raises:
            Overloaded: The queue has reached a bound, and the call is new.
        """
        key = (ticket.priority, ticket.arrival, next(self._order))
        turn = Turn(key, sequences, nbytes, asyncio.get_running_loop().create_future())
        self.sequences += sequences
        self.nbytes += nbytes
        if lacks_memory:
            heapq.heappush(self._no_memory, turn)
            self._retry_later()
        elif rounds:
            # calls with fewer refusals come first, so that none waits behind a call that no replica can take
            turn.key = (rounds, *key)
            heapq.heappush(self._refused, turn)
            self._retry_later()
        else:
            heapq.heappush(self._ready, turn)
            self._let_go()
        try:
            if not turn.begun.done() and not ticket.was_sent:
                self._require_bounds(turn)
            await turn.begun
        except BaseException:
            if turn.begun.cancelled() or not turn.begun.done():
                self._leave(turn)
            else:  # cancelled after its turn had begun
                self._end(turn)
            raise
        ticket.was_sent = True
        try:
            yield turn
        finally:
            self._end(turn)

    def fleet_changed(self, can_take_others: bool) -> None:
        """Release calls that now have room. Called when the router has new information about replicas.

        ``can_take_others``: Replicas came or left, or changed their state or version, so refused calls are sent again.
        Otherwise only the room has changed.
        """
        self._is_full = False
        if can_take_others:
            self._recall(len(self._refused) + len(self._no_memory))
        self._let_go()

    def _require_bounds(self, new: Turn) -> None:
        for what, asked, held, limit, name in (
            ("sequences", new.sequences, self.sequences, self._max_sequences, "MAX_SEQUENCES"),
            ("bytes", new.nbytes, self.nbytes, self._max_bytes, "MAX_BYTES"),
        ):
            if held > limit:
                raise Overloaded(
                    f"the gateway's queue is full: it holds {held - asked} of at most {limit} {what} ({name} in "
                    f"rollout_service/fleet/queue.py), and {asked} more were asked for; send them later, or raise "
                    "scaling.max_replicas or scaling.gateways",
                    {"bound": name, "limit": limit, "held": held - asked, "asked": asked},
                )

    def _let_go(self, sequences_beyond: int = 0) -> None:
        """Begin turns. ``sequences_beyond``: number of sequences released even if replicas reported that they are
        full."""
        while self._ready:
            if self._ready[0].begun.done():  # its caller has left
                heapq.heappop(self._ready)
                self._left -= 1
                continue
            # one call always goes: the known state of the fleet may be wrong, and a fleet of zero starts by it
            has_room = self._sequences_sent < self._room() and (not self._is_full or sequences_beyond > 0)
            if self._calls_sent and not has_room:
                return
            turn = heapq.heappop(self._ready)
            sequences_beyond -= turn.sequences
            self._calls_sent += 1
            self._sequences_sent += turn.sequences
            self._count_out(turn)
            turn.begun.set_result(None)

    def _recall(self, count: int) -> None:
        """Make ``count`` refused calls ready, and as many that lack memory: neither kind waits for the other."""
        for waiting in (self._refused, self._no_memory):
            recalled = 0
            while recalled < count and waiting:
                turn = heapq.heappop(waiting)
                if turn.begun.done():
                    self._left -= 1
                    continue
                turn.key = turn.key[-3:]
                heapq.heappush(self._ready, turn)
                recalled += 1

    def _end(self, turn: Turn) -> None:
        self._calls_sent -= 1
        self._sequences_sent -= turn.sequences
        if turn.was_refused:
            self._is_full |= turn.is_full
            self._let_go()
        else:
            self._recall(1)
            self._let_go(turn.sequences)

    def _leave(self, turn: Turn) -> None:
        turn.begun.cancel()
        self._count_out(turn)
        self._left += 1
        lists = self._ready, self._refused, self._no_memory
        if 2 * self._left > sum(map(len, lists)):
            for waiting in lists:
                waiting[:] = [each for each in waiting if not each.begun.done()]
                heapq.heapify(waiting)
            self._left = 0

    def _count_out(self, turn: Turn) -> None:
        self.sequences -= turn.sequences
        self.nbytes -= turn.nbytes

    def _retry_later(self) -> None:
        if not self._retrying:
            self._retrying = True
            (self._later or asyncio.get_running_loop().call_later)(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self._recall(RETRIED_CALLS)
        self._let_go(RETRIED_CALLS)
        if self._refused or self._no_memory:
            self._retry_later()
