"""What the router of this process tells the gateway: which replica has taken which call, and which replicas there are.

The router runs on a thread of Serve's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Placed = Callable[[int, str], None]
"""Takes a call's number and a replica's id."""


class Placements:
    """Of one process."""

    def __init__(self) -> None:
        self._listeners: dict[str, Placed] = {}

    def listen(self, origin: str, placed: Placed) -> None:
        """Have ``placed`` told of the calls that ``origin`` sends, on the router's thread."""
        self._listeners[origin] = placed

    def forget(self, origin: str) -> None:
        """Tell nobody any more."""
        self._listeners.pop(origin, None)

    def note(self, origin: str, number: int, replica_id: str) -> None:
        """A replica has taken a call."""
        placed = self._listeners.get(origin)
        if placed is not None:
            placed(number, replica_id)


PLACEMENTS = Placements()
"""Of this one."""


@dataclass(frozen=True)
class RoutedReplica:
    """One replica, as the router knows it."""

    state: str
    version: int | None
    others: int
    """Sequences that other gateways have there."""


class RoutedFleet:
    """The replicas among which the router of this process chooses."""

    def __init__(self) -> None:
        self.replicas: Mapping[str, RoutedReplica] = {}
        self._changed: Callable[[bool], None] | None = None

    def listen(self, changed: Callable[[bool], None]) -> None:
        """Have ``changed`` called on the router's thread: with True if replicas came, went or changed their state or
        version, with False if only the load of other gateways has changed."""
        self._changed = changed

    def update(self, replicas: Mapping[str, RoutedReplica]) -> None:
        """Take in what the router knows now."""
        before, self.replicas = self.replicas, dict(replicas)
        if self._changed is not None:
            self._changed(_without_load(before) != _without_load(self.replicas))

    def room(self, limit: int, share: int) -> int:
        """Return the number of sequences that the fleet may hold for this gateway.

        Args:
            limit: ``engine.admission_limit``.
            share: The part of the limit that is this gateway's whatever other gateways have there.
        """
        sound = [each for each in self.replicas.values() if each.state not in ("failed", "draining")]
        return sum(max(limit - each.others, share) for each in sound)


def _without_load(replicas: Mapping[str, RoutedReplica]) -> dict[str, tuple[str, int | None]]:
    return {replica_id: (each.state, each.version) for replica_id, each in replicas.items()}


ROUTED_FLEET = RoutedFleet()
"""Of this process."""
