"""State that the gateway shares with Serve's routers in its process: the replica of each call, and the known replicas.

Routers run on one of Serve's threads.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from rollout_service.runtime.recent import remember

MAX_SESSIONS = 100_000
"""Maximum number of sessions that a gateway remembers; the least recently used one is dropped."""
MAX_PREFIXES = 100_000
"""Maximum number of prefixes that a gateway remembers; the least recently used one is dropped."""
NEVER_SENT_S = 60.0
"""Time in seconds after which a chosen but unsent call is not counted: if it was cancelled, its end is never
reported."""

OnPlaced = Callable[[int, str], None]
"""Called with a call's number and a replica's id."""
CallId = tuple[str, int]
"""The origin and the number of a call."""


@dataclass
class _Sent:
    replica_id: str
    sequences: int
    session: str | None
    chosen_at: float
    prefixes: tuple[int, ...]
    arrived: bool = False


class Ledger:
    """Load of replicas by this and by other gateways, and the last replica of each session and prefix.

    Has a lock: the router runs on a thread of Serve, and the gateway reports arrivals and ends of calls.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sent: dict[CallId, _Sent] = {}
        self._own: dict[str, int] = {}
        self._reports: dict[str, Mapping[str, int]] = {}
        """Replica → its sequences by the gateway that sent them."""
        self.origin = ""
        """The router's own gateway, whose load is counted here at once, not seconds later."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._choices = 0

    def choose(
        self,
        call_id: CallId,
        replica_id: str,
        sequences: int,
        session: str | None,
        now: float,
        prefixes: tuple[int, ...] = (),
    ) -> None:
        """Count a call as in flight from the moment of choice: the next choice may come before it is sent.

        ``prefixes``: hashes of its prompt's prefixes, see ``fleet/routing.py``.
        """
        with self._lock:
            self.complete(call_id)
            self._sent[call_id] = _Sent(replica_id, sequences, session, now, prefixes)
            self._own[replica_id] = self._own.get(replica_id, 0) + sequences
            self._choices += 1
            self._turns[replica_id] = self._choices
            if session is not None:
                remember(self._sessions, session, replica_id, MAX_SESSIONS)
            for prefix in prefixes:
                remember(self._prefixes, prefix, replica_id, MAX_PREFIXES)

    def arrive(self, call_id: CallId, replica_id: str) -> None:
        """Note which replica got the call."""
        with self._lock:
            sent = self._sent.get(call_id)
            if sent is None:  # another router's
                return
            if sent.replica_id != replica_id:
                self.choose(call_id, replica_id, sent.sequences, sent.session, sent.chosen_at, sent.prefixes)
            self._sent[call_id].arrived = True

    def complete(self, call_id: CallId) -> None:
        """Note that a call has ended."""
        with self._lock:
            sent = self._sent.pop(call_id, None)
            if sent is not None and sent.replica_id in self._own:
                self._own[sent.replica_id] -= sent.sequences

    def report(self, replica_id: str, running: Mapping[str, int]) -> None:
        """Store a replica's number of sequences, by gateway."""
        with self._lock:
            self._reports[replica_id] = running

    def keep_only(self, replica_ids: Collection[str], now: float) -> None:
        """Drop calls on replicas that have left, and calls that were never sent."""
        with self._lock:
            for call_id, sent in list(self._sent.items()):
                if sent.replica_id not in replica_ids or (not sent.arrived and now - sent.chosen_at > NEVER_SENT_S):
                    self.complete(call_id)
            for replica_id in {*self._own, *self._reports}.difference(replica_ids):
                self._own.pop(replica_id, None)
                self._reports.pop(replica_id, None)
                self._turns.pop(replica_id, None)

    def load(self, replica_id: str) -> int:
        """Return the known number of sequences in flight on a replica."""
        return self.own(replica_id) + self.others(replica_id)

    def own(self, replica_id: str) -> int:
        """Return the number of this gateway's sequences in flight on a replica."""
        return self._own.get(replica_id, 0)

    def others(self, replica_id: str) -> int:
        """Return the number of other gateways' sequences on a replica, as last reported."""
        reported = self._reports.get(replica_id, {})
        return sum(n for origin, n in reported.items() if origin != self.origin)

    def turn(self, replica_id: str) -> int:
        """Return the number of the choice in which the replica was last chosen; 0: never."""
        return self._turns.get(replica_id, 0)

    def replica_of(self, session: str | None) -> str | None:
        """Return the replica of the session's last call; it may have left."""
        return None if session is None else self._sessions.get(session)

    def replica_with(self, prefixes: Iterable[int]) -> str | None:
        """Return the replica of the last prompt with the longest shared prefix; it may have left."""
        with self._lock:
            return next((self._prefixes[prefix] for prefix in prefixes if prefix in self._prefixes), None)


class Placements:
    """Placements of calls by this process's routers."""

    def __init__(self) -> None:
        self._listeners: dict[str, OnPlaced] = {}
        self._ledgers: list[Ledger] = []

    def listen(self, origin: str, placed: OnPlaced) -> None:
        """Call ``placed`` for each call that ``origin`` sends, in the event loop that sends it."""
        self._listeners[origin] = placed

    def forget(self, origin: str) -> None:
        """Remove the listener."""
        self._listeners.pop(origin, None)

    def add_ledger(self, ledger: Ledger) -> None:
        """Add the ledger of a router."""
        self._ledgers.append(ledger)

    def note(self, origin: str, number: int, replica_id: str) -> None:
        """Note that a call is sent to a replica."""
        for ledger in self._ledgers:
            ledger.arrive((origin, number), replica_id)
        placed = self._listeners.get(origin)
        if placed is not None:
            placed(number, replica_id)

    def end(self, origin: str, number: int) -> None:
        """Note that a call has ended, wherever it was."""
        for ledger in self._ledgers:
            ledger.complete((origin, number))


PLACEMENTS = Placements()
"""The placements of this process."""


@dataclass(frozen=True)
class RoutedReplica:
    """One replica, as the router knows it."""

    state: str
    version: int | None
    others: int
    """Number of other gateways' sequences on it."""


class RoutedFleet:
    """The replicas among which this process's router chooses."""

    def __init__(self) -> None:
        self.replicas: Mapping[str, RoutedReplica] = {}
        self._changed: Callable[[bool], None] | None = None

    def listen(self, changed: Callable[[bool], None]) -> None:
        """Register a listener, called on the router's thread. Its argument is True if replicas came, left or changed
        their state or version, and False if only the load by other gateways has changed."""
        self._changed = changed

    def update(self, replicas: Mapping[str, RoutedReplica]) -> None:
        """Update the replicas from the router."""
        before, self.replicas = self.replicas, dict(replicas)
        if self._changed is not None:
            self._changed(_without_load(before) != _without_load(self.replicas))

    def room(self, limit: int, share: int) -> int:
        """Return the number of sequences that the fleet may hold for this gateway.

        Args:
            limit: ``engine.admission_limit``.
            share: The part of the limit that is reserved for this gateway.
        """
        usable = [each for each in self.replicas.values() if each.state not in ("failed", "draining")]
        return sum(max(limit - each.others, share) for each in usable)


def _without_load(replicas: Mapping[str, RoutedReplica]) -> dict[str, tuple[str, int | None]]:
    return {replica_id: (each.state, each.version) for replica_id, each in replicas.items()}


_FLEETS: dict[str | None, RoutedFleet] = {}


def routed_fleet(group: str | None = None) -> RoutedFleet:
    """Return the replicas known in this process: of a group in ``scaling.groups``, or the others. Thread-safe."""
    return _FLEETS.setdefault(group, RoutedFleet())
