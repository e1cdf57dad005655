"""A replica's life, and what it says of itself.

    state     meaning                                              requests
    starting  there is no engine yet, or no version in it          no
    syncing   it stages or loads ``target``                        yes, once it serves a version
    ready     it serves the newest version                         yes
    stale     it serves a version, and could not load a newer one  yes
    asleep    it gave its memory back, and serves nothing since    they wait
    draining  it is to end                                         no
    failed    its engine is lost                                   no

The first five follow one another here; the last two override them wherever they come from.
"""

import logging
from typing import Final

from rollout_service.protocol.fleet import ReplicaState, UpdateTimings
from rollout_service.protocol.weight_log import Head

logger = logging.getLogger(__name__)

NEXT: Final[dict[ReplicaState, frozenset[ReplicaState]]] = {
    "starting": frozenset({"syncing"}),
    "syncing": frozenset({"syncing", "ready", "stale", "asleep"}),
    "ready": frozenset({"syncing", "stale", "asleep"}),
    "stale": frozenset({"stale", "syncing", "ready", "asleep"}),
    "asleep": frozenset({"asleep", "ready"}),
}
"""What may follow a state. ``syncing`` on ``syncing``: another version, or one that waits for its KV scales."""


class ReplicaLife:
    """Which version a replica serves, where it is on its way to the next, and what went wrong."""

    def __init__(self) -> None:
        self.state: ReplicaState = "starting"
        self.target: int | None = None
        """The version that is staged or loaded right now."""
        self.served: Head | None = None
        """The version that is served, as the log named it."""
        self.closed = False
        """There is no whole version in the engine, since one was begun to be loaded, or it slept: it stays closed until
        one is loaded."""
        self.error: str | None = None
        """Why it does not serve the newest version."""
        self.update: UpdateTimings | None = None
        """Timings of its last update."""

    def serves(self, head: Head) -> bool:
        """By number and content: a log restored from a backup may have given the number to other weights."""
        if self.served is None or self.closed:
            return False
        return (self.served.version, self.served.digest) == (head.version, head.digest)

    def syncs(self, version: int) -> None:
        """It begins to stage a version. One that woke is asleep to others until it serves it."""
        if self.state != "asleep":
            self._become("syncing")
        self.target = version

    def loads(self) -> None:
        """The engine is closed and begins to load: whatever it served before is gone."""
        self.closed = True

    def loaded(self) -> None:
        """The version is in the engine, which may be opened."""
        self.closed = False

    def updated(self, head: Head, update: UpdateTimings) -> None:
        """It serves a version."""
        self.served, self.update = head, update
        self.ready()

    def ready(self) -> None:
        """What it serves is the newest version, and nothing is held against it."""
        self._become("ready")
        self.target = self.error = None

    def waits(self, error: str) -> None:
        """It is on its way to a version and waits for something that it needs, such as KV scales."""
        self.error = error
        if not self.closed:
            self._become("syncing")

    def stays(self, error: str) -> None:
        """It could not load a version, and goes on with what it has, if that may be served."""
        self.error, self.target = error, None
        if not self.closed:
            self._become("stale")

    def sleeps(self) -> None:
        """The engine gave its memory back, with what it served."""
        self._become("asleep")
        self.served = self.target = self.error = None
        self.closed = True

    def cannot_wake(self, error: str) -> None:
        """It is to wake, and has not the memory."""
        self.error = error

    def _become(self, state: ReplicaState) -> None:
        if state not in NEXT[self.state]:
            raise AssertionError(f"a replica that is {self.state} does not become {state}")
        self.state = state
