"""The states of a replica and of its engine: the life cycle, the pauses, and the labels of served versions.

    state     meaning                                              requests
    starting  there is no engine yet, or no version in it          no
    syncing   it stages or loads ``target``                        yes, once it serves a version
    ready     it serves the newest version                         yes
    stale     it serves a version, and could not load a newer one  yes
    asleep    it has released its memory and serves nothing        they wait
    draining  it is ending                                         no
    failed    its engine is lost                                   no

``ReplicaLife`` has the first five states. The last two override any of them.
"""

import asyncio
from collections.abc import Callable, Sequence

from rollout_service.engine.adapter import EngineAdapter
from rollout_service.protocol.fleet import PauseMode, ReplicaState, UpdateTimings
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.protocol.weight_log import Control, DesiredState, Head

MAX_VERSIONS = 1000
"""Maximum number of labels; more than a completion can span."""


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
            self.state = "syncing"
        self.target = version

    def updated(self, head: Head, update: UpdateTimings) -> None:
        """Mark the version as served."""
        self.served, self.update = head, update
        self.ready()

    def ready(self) -> None:
        """Mark the served version as the newest, without errors."""
        self.state = "ready"
        self.target = self.error = None

    def stays(self, error: str) -> None:
        """Record that a version could not be loaded. The engine continues with its current version, if it has one."""
        self.error, self.target = error, None
        if not self.closed:
            self.state = "stale"

    def sleeps(self) -> None:
        """Mark the replica as asleep, without a version."""
        self.state = "asleep"
        self.served = self.target = self.error = None
        self.closed = True


class Pausing:
    """Pauses and resumes one engine for ordered pauses, sleeps and versions. The newest command takes effect.

    The mode ``wait`` lets running rollouts finish, which takes as long as the longest one. It runs in its own task,
    and a resume or another mode can replace it. vLLM 0.32 allows both. Its scheduler changes state at once
    (``EngineCoreProc.pause_scheduler``), and only the reply to a waiting pause is delayed until the engine is idle.
    """

    def __init__(self, engine: EngineAdapter, drained: Callable[[], None]) -> None:
        """Create the state. ``drained``: called when the last running rollout of a ``wait`` pause has finished."""
        self._engine, self._drained = engine, drained
        self._mode: PauseMode | None = None
        self._clears = True
        """True if the ordered pause drops the KV cache."""
        self._taken = ""
        self._drain: asyncio.Task[None] | None = None
        self._drain_clears = True
        """True if the KV cache is dropped when the running rollouts have finished."""
        self._for_version = False
        self.asleep = False
        """True if the engine has released its memory."""
        self._has_weights = True
        """False from a sleep until a version is loaded."""
        self.obeyed = ""
        """The last order that the engine has carried out."""
        self.aborted = 0
        """The largest ``DesiredState.abort`` that was carried out."""
        self.returns = 0
        """Number of aborts, and of pauses that return aborted calls. A call during which this grows must not be
        continued."""

    @property
    def paused(self) -> bool:
        """True if a pause was ordered and nothing runs any more."""
        return self._mode is not None and self.obeyed == self._taken

    def drains(self) -> bool:
        """Return True while running rollouts are finishing. Raises the error of a failed wait."""
        if self._drain is None:
            return False
        if self._drain.done():
            self._drain.result()
            return False
        return True

    def begin(self, control: Control) -> None:
        """Adopt the current order when an idle engine starts. It stays paused until its first version is loaded."""
        # an engine that should sleep has yet to do so
        self._taken = self.obeyed = "" if control.asleep else control.order
        self._mode, self._for_version = control.mode if control.paused else None, True
        self._clears = control.clear_cache

    async def obey(self, desired: DesiredState, may_sleep: bool = True) -> bool:
        """Carry out the desired state. Returns True if that was completed now. Does not wait for running rollouts.

        ``may_sleep``: False: an engine that is told to sleep is only paused for it.

        Raises MemoryTaken if the engine cannot wake up; the next call tries again.
        """
        has_aborted = desired.abort > self.aborted
        if has_aborted:
            self.returns += 1
            await self._engine.abort()
            self.aborted = desired.abort
        return await self._obey_order(desired, may_sleep) or has_aborted

    async def _obey_order(self, desired: DesiredState, may_sleep: bool) -> bool:
        if desired.order != self._taken:
            before, kept, self._taken = self._mode, not self._clears, desired.order
            self._mode, self._clears = desired.pause_mode if desired.paused else None, desired.clear_cache
            if self._mode != before:
                self.returns += self._mode == "abort" and desired.on_abort == "return"
                await self._apply()
            elif self._mode is not None and self._clears and kept:
                await self._apply()
        if desired.asleep and not self.asleep and not self.drains():
            if not may_sleep:
                return False
            await self._engine.sleep()
            self.asleep, self._for_version, self._has_weights = True, False, False
        elif self.asleep and not desired.asleep:
            await self._engine.wake_up()
            self.asleep, self._for_version = False, True  # the engine has no weights yet
        # the state is applied after the version is loaded, and a ``wait`` begins then
        later = self._for_version and (self._mode is None or (self._mode == "wait" and self._drain is None))
        if self.obeyed == self._taken or later or self.drains():
            return False
        self.obeyed = self._taken
        return True

    async def close(self, mode: PauseMode, clear_cache: bool = True) -> None:
        """Pause for a version. With ``wait`` the engine is paused once ``drains`` returns False.

        ``clear_cache``: drop the KV cache once it is paused.
        """
        self._for_version = True
        await self._pause(mode, clear_cache)

    async def open(self) -> None:
        """Return to the ordered state after ``close``; the engine has weights."""
        self._has_weights = True
        if not self._for_version:
            return
        self._for_version = False
        waits = self._mode == "wait" and self.obeyed != self._taken
        if self._mode is None or waits or self.drains():
            await self._apply()

    def stop_waiting(self) -> None:
        """Cancel the wait for running rollouts."""
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.cancel()

    async def _apply(self) -> None:
        if self._mode is not None:
            await self._pause(self._mode, self._clears)
        elif not self._for_version and not self.asleep:
            self.stop_waiting()
            await self._engine.resume()

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self._has_weights:
            self._start_drain(clear_cache)
            return
        self.stop_waiting()
        # what a sleep holds must not run to its end on empty memory
        await self._engine.pause("keep" if mode == "wait" else mode, clear_cache)

    def _start_drain(self, clear_cache: bool) -> None:
        if self.drains():
            if self._drain_clears or not clear_cache:
                return
            self.stop_waiting()
        self._drain, self._drain_clears = asyncio.create_task(self._engine.pause("wait", clear_cache)), clear_cache
        self._drain.add_done_callback(lambda _: self._drained())


class ServedLabels:
    """The labels of the versions that a replica has served, for the spans of its completions.

    vLLM knows only version numbers, and a completion may have tokens of several versions.
    """

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def serve(self, head: Head) -> None:
        """Record a loaded version."""
        self._labels.pop(head.version, None)  # the log may have been reset, so that the number means another version
        if head.label is not None:
            self._labels[head.version] = head.label
            for version in list(self._labels)[:-MAX_VERSIONS]:
                del self._labels[version]

    def on(self, completions: Sequence[Completion]) -> tuple[Completion, ...]:
        """Return the completions with labels in their spans."""
        if not self._labels:
            return tuple(completions)
        return tuple(
            each.model_copy(update={"spans": tuple(self._with_label(span) for span in each.spans)})
            for each in completions
        )

    def _with_label(self, span: Span) -> Span:
        label = self._labels.get(span.version)
        return span if label is None else span.model_copy(update={"label": label})
