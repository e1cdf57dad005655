"""How a replica follows the log: it pulls. Wishes from the ingest only wake it earlier than its own poll.

    listen:  report to the ingest, long-poll it            (keeps reporting while an update runs)
    act:     newest version in the log differs from ours → stage while serving → pause → load → resume → report
             (pauses and resumes that are ordered: engine/pausing.py)

On a node without the log, the newest version is what the ingest says, and staging fetches it first
(store/node_cache.py). The log is read anew at each turn, so a lost wake-up, a restarted ingest or a skipped version
only cost time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from rollout_service.config import WeightsConfig
from rollout_service.engine.pausing import Pausing
from rollout_service.engine.startup import REPORTS
from rollout_service.errors import (
    EngineFailed,
    InsufficientStorage,
    LogCorrupt,
    NotFound,
    NotReady,
    RolloutServiceError,
)
from rollout_service.kv_scales.calibrator import KVScales, NoKVScales
from rollout_service.metrics import table
from rollout_service.metrics.process import count_update, record
from rollout_service.protocol.fleet import PauseMode, ReplicaState, ReplicaStatus, UpdateTimings
from rollout_service.protocol.weight_log import DesiredState, Head, Origin
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.store.node_cache import NodeCache

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

_LONGEST_WAIT_S = 600.0
"""Between two readings of a version that was found corrupt: someone may mend it."""

_GOODBYE_S = 2.0
"""A replica waits no longer for the ingest when it ends: the whole service may be ending."""


class Engine(Protocol):
    """What ``WeightSync`` needs of the engine adapter."""

    @property
    def broken(self) -> str | None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def stage(self, folder: Path, digest: str | None = None) -> None: ...
    async def load(self, folder: Path, version: int, kv_scales: dict[str, float] | None = None) -> float: ...


class Coordinator(Protocol):
    """What it needs of the ingest; the shadow has a watch of its log in this place."""

    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState: ...
    async def report(self, status: ReplicaStatus) -> None: ...
    async def goodbye(self, replica_id: str) -> None: ...


class WeightSync:
    """Keeps one engine at the newest version and in the desired pause state."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        ingest: Coordinator,
        config: WeightsConfig,
        fingerprint: str,
        running: Callable[[], int] = lambda: 0,
        draining: Callable[[], bool] = lambda: False,
        copies: NodeCache | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        """
        Args:
            running: sequences in flight, for the reports.
            draining: whether this replica gets no new ones any more, for the reports.
            copies: of this node, if it does not see the log.
            kv_scales: None: the cache has none.
        """
        self._replica_id, self._engine, self._ingest, self._config = replica_id, engine, ingest, config
        self._fingerprint, self._running, self._draining = fingerprint, running, draining
        self._copies, self._kv_scales = copies, kv_scales or NoKVScales()
        self._log = WeightLog(config.root_here()) if copies is None else copies.log
        self._wish: DesiredState | None = None
        self._woken = asyncio.Event()
        self._moved = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._state: ReplicaState = "starting"
        self._target: int | None = None
        self._pausing = Pausing(engine, self._woken.set)
        self._unserved: int | None = None
        """A version that is loaded and not served: the engine stays closed until one can be."""
        self._error: str | None = None
        self._update: UpdateTimings | None = None
        self._corrupt: Head | None = None
        self._wait_s = self._retry_at = 0.0
        self._served: Head | None = None
        self._origin: Origin | None = None
        self._doubted: tuple[Origin, int] | None = None
        self._answers = 0
        self._staged: tuple[Head, Manifest, float] | None = None
        self.version: int | None = None
        """The version being served."""

    async def start(self) -> None:
        """Load the newest version, then follow. Returns when the engine may serve; raises what loading raises."""
        while self._copies is None and self._log.head() is None:
            await asyncio.sleep(0.1)  # the ingest is making version 0
        control = self._log.control() if self._copies is None else self._copies.newest.control
        self._pausing.begin(control)
        self._origin = self._log.origin() if self._copies is None else self._copies.newest.origin
        while not self._serves(head := self._newest()):
            try:
                await self._to_version(head)
                await self._look()
            except NotReady as error:
                logger.warning("version %d is not here yet: %s", head.version, error)
                await asyncio.sleep(self._config.poll_s)
            except (LogCorrupt, NotFound) as error:
                await self._look()
                if self._newest() == head:
                    raise
                logger.info("version %d was removed for a newer one: %s", head.version, error)
        self._state = "ready"
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._act())]

    def status(self) -> ReplicaStatus:
        """What this replica says of itself."""
        broken = self._engine.broken
        return ReplicaStatus(
            replica_id=self._replica_id,
            sequence=next(REPORTS),
            version=self.version,
            digest=None if self._served is None else self._served.digest,
            log=None if self._origin is None else self._origin.log,
            state="failed" if broken else "draining" if self._draining() else self._state,
            target=self._target,
            paused=self._pausing.paused,
            obeyed=self._pausing.obeyed,
            running=self._running(),
            error=broken or self._kv_scales.error or self._error,
            update=self._update,
            kv_cache=self._kv_scales.status,
        )

    async def wait_version(self, version: int, timeout_s: float) -> bool:
        """Wait until this replica serves ``version`` or newer; False after ``timeout_s``."""
        async with self._moved:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._moved.wait_for(lambda: self.version is not None and self.version >= version)
            except TimeoutError:
                return False
        return True

    async def caught_up(self) -> None:
        """Return once the newest version in the log is being served. Raises LogCorrupt or EngineFailed if it cannot."""
        while await self._is_behind():
            self.check_health()
            if self._error is not None:
                raise LogCorrupt(self._error)
            await asyncio.sleep(0.05)

    def holds(self, version: int) -> bool:
        """Whether it serves what the log has under that number now. Raises LogCorrupt."""
        head, served = self._log.head(), self._served
        if head is None or served is None or served.version != version or head.version < version:
            return False
        return self._serves(head) if head.version == version else version in self._log.versions()

    def check_health(self) -> None:
        """Raise if following has ended: a replica that follows no more would grow stale unseen."""
        for task in self._tasks:
            if task.done():
                raise EngineFailed(f"replica {self._replica_id} stopped following the log: {task.exception()}")

    def stop(self) -> None:
        """Follow no more."""
        for task in self._tasks:
            task.cancel()
        self._pausing.stop()

    async def leave(self) -> None:
        """Follow no more, and tell the ingest that this replica ends."""
        self.stop()
        with suppress(RolloutServiceError, TimeoutError):  # it then finds out by itself
            async with asyncio.timeout(_GOODBYE_S):
                await self._ingest.goodbye(self._replica_id)

    async def _listen(self) -> None:
        while True:
            try:
                wish = await self._ingest.sync(self.status(), self._wish)
            except RolloutServiceError as error:
                poll_s = self._config.poll_s
                logger.warning("the ingest does not answer (%s); reading the log every %s s", error, poll_s)
                await asyncio.sleep(poll_s)
                self._woken.set()
                continue
            self._wish, self._answers = wish, self._answers + 1
            self._woken.set()

    async def _act(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            head: Head | None = None
            try:
                await self._obey()
                head = await self._looked()
                if self._serves(head):
                    await self._pausing.open()
                    await self._recovered()
                elif not self._backs_off_from(head):
                    await self._to_version(head)
                    await self._obey()
                    await self._report()
            except NotFound as error:  # a newer version was committed and this one dropped meanwhile
                logger.info("looking again: %s", error)
                self._woken.set()
            except NotReady as error:  # the next poll looks again
                logger.warning("staying at version %s: %s", self.version, error)
                if head is not None:
                    await self._stay(error)
            except (LogCorrupt, InsufficientStorage) as error:
                record(table.UPDATES, outcome="unreadable")
                wait_s = self._back_off(head)
                logger.error("staying at version %s, looking again in %.1f s: %s", self.version, wait_s, error)
                await self._stay(error)

    async def _stay(self, error: Exception) -> None:
        """Say why a version was not loaded. The engine goes on with what it has, if that may be served."""
        waits = self._staged is not None and isinstance(error, NotReady)  # for the KV scales of what is staged
        if self._unserved is None:
            await self._pausing.open()
            self._state = "syncing" if waits else "stale"
        self._target = self._target if waits else None
        self._error = str(error)
        await self._report()

    async def _recovered(self) -> None:
        """Be ready again: what is served is the newest version, and whatever was said against the log holds no more."""
        if self._state != "ready":
            self._state, self._target, self._error, self._staged = "ready", None, None, None
            await self._report()

    def _back_off(self, head: Head | None) -> float:
        """Do not read a corrupt version again at each poll; returns for how many seconds."""
        again = self._corrupt is not None and self._corrupt == head
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if again else 2 * self._config.poll_s
        self._corrupt, self._retry_at = head, time.monotonic() + self._wait_s
        return self._wait_s

    def _backs_off_from(self, head: Head) -> bool:
        return head == self._corrupt and time.monotonic() < self._retry_at

    async def _obey(self) -> None:
        if self._wish is not None and await self._pausing.obey(self._wish):
            await self._report()

    async def _to_version(self, head: Head) -> None:
        self._state, self._target = "syncing", head.version
        await self._report()  # before the first one, too: the ingest keeps what a replica says it is loading
        # a version that waits for the KV scales that another replica measures lies here already
        if self._staged is None or self._staged[0] != head:
            self._staged = None
            self._staged = head, *await self._stage(head)
        _, manifest, stage_s = self._staged
        kv_scales = await self._kv_scales.scales_for(manifest)
        self._staged = None
        closed = time.perf_counter()
        if not await self._closed_for(head):
            return
        self._unserved = head.version
        load_s = await self._engine.load(self._log.folder(head.version), head.version, kv_scales)
        await self._kv_scales.loaded(manifest)
        self._unserved = None
        await self._pausing.open()
        closed_s = time.perf_counter() - closed
        async with self._moved:
            self.version, self._served = head.version, head
            self._moved.notify_all()
        self._update = UpdateTimings(stage_s=stage_s, closed_s=closed_s, load_s=load_s)
        count_update(self._update, self._log.folder(head.version))
        self._state, self._target, self._error = "ready", None, None
        if self._copies is not None:
            self._copies.release(but=head.version)
        logger.info("version %d: staged %.3f s, closed %.3f s", head.version, stage_s, closed_s)

    async def _closed_for(self, head: Head) -> bool:
        """Close the engine for a version; False if the log has another one before the last rollout has finished."""
        await self._pausing.close(head.mode)
        while self._pausing.drains():
            await self._woken.wait()
            self._woken.clear()
            await self._obey()
            with suppress(NotReady):  # nobody knows of another one
                if await self._looked() != head:
                    self._woken.set()
                    return False
        return True

    async def _stage(self, head: Head) -> tuple[Manifest, float]:
        """Have every byte here and next to the model, checked, while the engine serves; returns seconds, too.

        Raises LogCorrupt, or what fetching or the engine raises.
        """
        started = time.perf_counter()
        return await self._fetch_and_read(head), time.perf_counter() - started

    async def _fetch_and_read(self, head: Head) -> Manifest:
        if self._copies is None:
            return await self._read(head)
        await self._copies.fetch(head)
        try:
            return await self._read(head)
        except LogCorrupt as error:
            logger.warning("fetching version %d anew: %s", head.version, error)
            await self._copies.forget(head.version)
            await self._copies.fetch(head)
            return await self._read(head)

    async def _read(self, head: Head) -> Manifest:
        """Have the engine check a version's bytes as it reads them next to the model; all else is checked here."""
        manifest = await self._checked(head, asyncio.to_thread(self._manifest, head))
        await self._checked(head, self._engine.stage(self._log.folder(head.version), head.digest))
        return manifest

    def _manifest(self, head: Head) -> Manifest:
        manifest = self._log.manifest(head.version, head.digest)
        if manifest.fingerprint != self._fingerprint:
            raise LogCorrupt(f"version {head.version} in {self._log.root} belongs to another model")
        self._log.verify_frame(manifest)
        return manifest

    async def _checked(self, head: Head, reading: Awaitable[_Found]) -> _Found:
        """Raises NotFound or LogCorrupt for what cannot be read."""
        try:
            return await reading
        except (OSError, LogCorrupt) as error:
            if head.version not in self._log.versions():
                raise NotFound(f"version {head.version} was removed while it was read") from error
            if isinstance(error, LogCorrupt):
                raise
            raise LogCorrupt(f"version {head.version} cannot be read: {error}") from error

    async def _look(self) -> None:
        if self._copies is not None:
            await self._copies.look()

    async def _is_behind(self) -> bool:
        try:
            return not self._serves(await self._looked())
        except NotReady:  # nobody knows
            return True

    async def _looked(self) -> Head:
        await self._look()
        self._require_the_ingests_log()
        return self._newest()

    def _serves(self, head: Head) -> bool:
        """By number and content: a log restored from a backup may have given the number to other weights."""
        served = self._served
        if served is None or self._unserved is not None:
            return False
        return (served.version, served.digest) == (head.version, head.digest)

    def _require_the_ingests_log(self) -> None:
        """Raise LogCorrupt, or NotReady while that is not certain, unless the ingest writes the log that is read here.

        One that starts on another node with an empty root makes a log of its own.
        """
        self._origin = self._log.origin() if self._copies is None else self._copies.newest.origin
        named = None if self._wish is None else self._wish.origin
        if self._copies is not None or named is None or named == self._origin:
            self._doubted = None
            return
        # what an ingest that died had said is older than what the next one has signed: a later answer decides
        if self._doubted is None or self._doubted[0] != named:
            self._doubted = named, self._answers
        if self._doubted[1] == self._answers:
            raise NotReady(f"the ingest has just restarted, or writes another log than the one at {self._log.root}")
        raise LogCorrupt(
            f"the ingest writes another log now ({named}) than the one at {self._log.root} ({self._origin}), and "
            "nothing of it is loaded here: bring the ingest back to the node with its log, see "
            "weights.ingest_resources, or restart the service"
        )

    def _newest(self) -> Head:
        if self._copies is not None:
            return self._copies.newest.head
        head = self._log.head()
        if head is None:
            raise LogCorrupt(f"{self._log.root}/LATEST is gone")
        return head

    async def _report(self) -> None:
        try:
            async with asyncio.timeout(self._config.poll_s):
                await self._ingest.report(self.status())
        except (RolloutServiceError, TimeoutError) as error:
            logger.warning("could not report to the ingest: %s", error)  # the next sync reports again
