"""Which replica has taken which call, as the router in a gateway tells that gateway.

The router runs on a thread of Serve's.
"""

from collections.abc import Callable

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
