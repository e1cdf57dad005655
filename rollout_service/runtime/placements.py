"""Information between this process's routers and the gateway: the replica of each call, and the known replicas.

Routers run on one of Serve's threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

OnPlaced = Callable[[int, str], None]
"""Called with a call's number and a replica's id."""
CallId = tuple[str, int]
"""The origin and the number of a call."""


class CallLedger(Protocol):
    """The calls that one router has placed."""

    def arrive(self, call_id: CallId, replica_id: str) -> None:
        """Note which replica got a call. Calls of other routers are ignored."""

    def complete(self, call_id: CallId) -> None:
        """Note that a call has ended. Calls of other routers are ignored."""


class Placements:
    """Placements of calls by this process's routers."""

    def __init__(self) -> None:
        self._listeners: dict[str, OnPlaced] = {}
        self._ledgers: list[CallLedger] = []

    def listen(self, origin: str, placed: OnPlaced) -> None:
        """Call ``placed`` for each call that ``origin`` sends, in the event loop that sends it."""
        self._listeners[origin] = placed

    def forget(self, origin: str) -> None:
        """Remove the listener."""
        self._listeners.pop(origin, None)

    def add_ledger(self, ledger: CallLedger) -> None:
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
        sound = [each for each in self.replicas.values() if each.state not in ("failed", "draining")]
        return sum(max(limit - each.others, share) for each in sound)


def _without_load(replicas: Mapping[str, RoutedReplica]) -> dict[str, tuple[str, int | None]]:
    return {replica_id: (each.state, each.version) for replica_id, each in replicas.items()}


_FLEETS: dict[str | None, RoutedFleet] = {}


def routed_fleet(group: str | None = None) -> RoutedFleet:
    """Return the replicas known in this process: of a group in ``scaling.groups``, or the others. Thread-safe."""
    return _FLEETS.setdefault(group, RoutedFleet())
