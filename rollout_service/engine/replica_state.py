"""The life cycle and the status of a replica.

    state     meaning                                              requests
    starting  there is no engine yet, or no version in it          no
    syncing   it stages or loads ``target``                        yes, once it serves a version
    ready     it serves the newest version                         yes
    stale     it serves a version, and could not load a newer one  yes
    asleep    it has released its memory and serves nothing        they wait
    draining  it is ending                                         no
    failed    its engine is lost                                   no

``ReplicaLife`` has the transitions between the first five states. The last two override any of them.
"""

from typing import Final

from rollout_service.protocol.fleet import ReplicaState, UpdateTimings
from rollout_service.protocol.weight_log import Head

NEXT: Final[dict[ReplicaState, frozenset[ReplicaState]]] = {
    "starting": frozenset({"syncing"}),
    "syncing": frozenset({"syncing", "ready", "stale", "asleep"}),
    "ready": frozenset({"syncing", "stale", "asleep"}),
    "stale": frozenset({"stale", "syncing", "ready", "asleep"}),
    "asleep": frozenset({"asleep", "ready"}),
}
"""The allowed next states. ``syncing`` may follow itself for another version."""


class ReplicaLife:
    """The served version, the progress to the next one, and the last error."""

    def __init__(self) -> None:
        self.state: ReplicaState = "starting"
        self.target: int | None = None
        """The version being staged or loaded."""
        self.served: Head | None = None
        """The served version, as the log named it."""
        self.closed = False
        """True if the engine holds no complete version, because a load has begun or it has slept. It stays paused until
        a version is loaded."""
        self.error: str | None = None
        """The reason why it does not serve the newest version."""
        self.update: UpdateTimings | None = None
        """Timings of its last update."""

    def serves(self, head: Head) -> bool:
        """Return True if ``head`` is served, by number and content. A restored backup may reuse a number for other
        weights."""
        if self.served is None or self.closed:
            return False
        return (self.served.version, self.served.digest) == (head.version, head.digest)

    def syncs(self, version: int) -> None:
        """Begin to stage a version. A replica that is waking up stays ``asleep`` until it serves the version."""
        if self.state != "asleep":
            self._become("syncing")
        self.target = version

    def loads(self) -> None:
        """Begin to load with the engine paused. The previous version is lost."""
        self.closed = True

    def loaded(self) -> None:
        """Mark the engine as holding a complete version."""
        self.closed = False

    def updated(self, head: Head, update: UpdateTimings) -> None:
        """Mark the version as served."""
        self.served, self.update = head, update
        self.ready()

    def ready(self) -> None:
        """Mark the served version as the newest, without errors."""
        self._become("ready")
        self.target = self.error = None

    def stays(self, error: str) -> None:
        """Record that a version could not be loaded. The engine continues with its current version, if it has one."""
        self.error, self.target = error, None
        if not self.closed:
            self._become("stale")

    def sleeps(self) -> None:
        """Mark the replica as asleep, without a version."""
        self._become("asleep")
        self.served = self.target = self.error = None
        self.closed = True

    def cannot_wake(self, error: str) -> None:
        """Record that the replica cannot wake up for lack of memory."""
        self.error = error

    def _become(self, state: ReplicaState) -> None:
        if state not in NEXT[self.state]:
            raise AssertionError(f"a replica that is {self.state} does not become {state}")
        self.state = state
