"""Keep a replica at the newest version of the log. The replica pulls; the ingest only wakes it before its next poll.

    listen:  report to the ingest, long-poll it for the desired state   (keeps reporting while an update runs)
    act:     the newest version in the log differs from ours → stage while serving → pause → load → resume → report

See engine/followed_log.py for the log, engine/replica_state.py for states and ordered pauses. Each turn reads the log
again. A lost wake-up, a restarted ingest or a skipped version therefore only costs time.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from rollout_service.config import WeightsConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.adapters import ReplicaAdapters
from rollout_service.engine.followed_log import FollowedLog
from rollout_service.engine.replica_state import Pausing, ReplicaLife, ServedLabels
from rollout_service.engine.startup import REPORTS
from rollout_service.errors import (
    EngineFailed,
    InsufficientStorage,
    LogCorrupt,
    LogUnreadable,
    MemoryTaken,
    NotFound,
    NotReady,
    RolloutServiceError,
)
from rollout_service.kv_scales.cache_choice import CacheChooser
from rollout_service.metrics import table
from rollout_service.metrics.process import count_update, record
from rollout_service.protocol.fleet import (
    AttentionStatus,
    EngineLoad,
    ReplicaStatus,
    UpdateTimings,
)
from rollout_service.protocol.weight_log import DesiredState, Head, Origin
from rollout_service.runtime.rpc import IngestCalls, MonitorCalls, until_answered
from rollout_service.runtime.tasks import ChangeNotifier
from rollout_service.store.manifest import Manifest
from rollout_service.store.node_cache import NodeCache

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 600.0
"""Maximum seconds between two reads of a corrupt version, which may be repaired."""

_REPEAT_S = 60.0
"""Minimum seconds between two log lines about one failure."""

_GOODBYE_S = 2.0
"""Timeout in seconds for the last call to the ingest, which may be ending, too."""

_MONITOR_S = 2.0
"""Timeout in seconds for a call to the monitor, which delays an update."""


class WeightSync:
    """Keeps one engine at the newest version, or that of its group, and in the desired pause state."""

    def __init__(
        self,
        replica_id: str,
        engine: EngineAdapter,
        ingest: IngestCalls,
        config: WeightsConfig,
        fingerprint: str,
        running: Callable[[], int] = lambda: 0,
        draining: Callable[[], bool] = lambda: False,
        copies: NodeCache | None = None,
        kv_cache: CacheChooser | None = None,
        load: Callable[[], EngineLoad] | None = None,
        attention: AttentionStatus | None = None,
        group: str | None = None,
        adapters: ReplicaAdapters | None = None,
        kv_ages: MonitorCalls | None = None,
    ) -> None:
        """Create the follower.

        Args:
            replica_id, engine, ingest, config: this replica, its engine, the ingest and ``weights``.
            fingerprint: the fingerprint of the served model; versions of other models are refused.
            running: returns the number of sequences in flight, for reports.
            draining: returns True if this replica gets no new requests, for reports.
            copies: this node's copies of the log, if it cannot access the log.
            kv_cache: chooses the dtype of the KV cache. None: it needs no choice.
            load: returns the engine's load, for reports.
            attention: the engine's attention status, for reports.
            group: this replica's group in ``scaling.groups``, which is pinned to a version. None: it has no group.
            adapters: this replica's adapters. None: it serves none.
            kv_ages: chooses ``weights.kv_max_age`` for each version. None: it never changes.
        """
        self._replica_id, self._engine, self._ingest, self._config = replica_id, engine, ingest, config
        self._running, self._draining, self._load, self._attention = running, draining, load, attention
        self._kv_cache, self._group, self._adapters, self._kv_ages = kv_cache, group, adapters, kv_ages
        find_pin = None if group is None else functools.partial(ingest.pinned, group)
        self._log = FollowedLog(config.root_here(), copies, fingerprint, find_pin)
        self._life = ReplicaLife()
        self._woken, self._moved = asyncio.Event(), ChangeNotifier()
        self.pausing = Pausing(engine, self._woken.set)
        self._tasks: list[asyncio.Task[None]] = []
        self._desired: DesiredState | None = None
        self._answers = 0
        self._cached_of: Origin | None = None
        """The log of the served version, and its writer then."""
        self._cached_with: dict[str, float] | None = None
        """KV scales of the served version, and of the codes in the KV cache."""
        self._corrupt = _CorruptVersion(2 * config.poll_s)
        self._unreadable = _Repeated()
        self.labels = ServedLabels()
        """The labels of the versions served here."""

    @property
    def version(self) -> int | None:
        """The number of the served version."""
        return None if self._life.served is None else self._life.served.version

    @property
    def digest(self) -> str | None:
        """The digest of the served version."""
        return None if self._life.served is None else self._life.served.digest

    async def start(self) -> None:
        """Load the newest version, then follow the log. Returns when the engine may serve; raises loading errors.

        Commits wait for this replica once the ingest knows that it holds a version. The newest version at that time is
        therefore new enough, even if versions are committed faster than an engine loads them.
        """
        self.pausing.begin(await self._log.open())
        head: Head | None = None
        failed: Head | None = None
        is_known = False
        while True:
            try:
                await self._log.find_pin()
                if self._life.serves(head := self._log.newest()):
                    break
                await self._to_version(head)
                if is_known and self._group is None and self._life.serves(head):
                    break
                is_known = await self._report()  # before the log is read again
                await self._log.look()
            except NotReady as error:
                if self._unreadable.is_news(str(error)):
                    logger.warning("the newest version, %s, is not here yet: %s", head and head.version, error)
                await asyncio.sleep(self._config.poll_s)
            except (LogCorrupt, NotFound) as error:
                with suppress(NotReady):  # the next turn reports it
                    await self._log.look()
                # retry once, since a disk read may fail temporarily
                if failed == head == self._log.newest():
                    raise
                failed = head
                logger.warning("version %s is read again, or a newer one: %s", head and head.version, error)
        following = [self._listen(), self._act()]
        if self._adapters is not None:
            await self._hold_adapters(self._adapters)
            following.append(self._follow_adapters(self._adapters))
        self._tasks = [asyncio.create_task(each) for each in following]

    async def _hold_adapters(self, adapters: ReplicaAdapters) -> None:
        """Load the adapters that the ingest names; waits for the ingest."""
        desired = await until_answered(lambda: self._ingest.sync(self.status(), None), self._config.poll_s)
        adapters.want(desired.adapters)
        await adapters.settle()

    async def _follow_adapters(self, adapters: ReplicaAdapters) -> None:
        async for _ in adapters.follow():
            await self._report()

    def status(self) -> ReplicaStatus:
        """Return this replica's status."""
        broken, life, origin = self._engine.broken, self._life, self._log.origin
        return ReplicaStatus(
            replica_id=self._replica_id,
            group=self._group,
            sequence=next(REPORTS),
            version=self.version,
            digest=self.digest,
            label=None if life.served is None else life.served.label,
            log=None if origin is None else origin.log,
            state="failed" if broken else "draining" if self._draining() else life.state,
            target=life.target,
            paused=self.pausing.paused,
            obeyed=self.pausing.obeyed,
            aborted=self.pausing.aborted,
            running=self._running(),
            takes_memory=True,
            error=broken or (self._kv_cache and self._kv_cache.error) or life.error,
            update=life.update,
            staging=self._engine.staging,
            kv_cache=None if self._kv_cache is None else self._kv_cache.status,
            attention=self._attention,
            load=None if self._load is None else self._load(),
            adapters=() if self._adapters is None else self._adapters.status(),
        )

    async def wait_version(self, version: int, timeout_s: float, *, exact: bool = False) -> bool:
        """Wait until this replica serves ``version`` or newer. Returns False after ``timeout_s``.

        A sleeping replica will load the newest version when it wakes up. If that is new enough, this returns True at
        once, and requests wait in the engine.

        ``exact``: True if a newer version does not qualify. Returns False at once if this replica serves a newer one.
        """
        if self.version is None:
            with suppress(LogCorrupt, NotReady):
                newest = self._log.newest().version
                if newest == version or (newest > version and not exact):
                    return True
        if not await self._moved.wait(lambda: self.version is not None and self.version >= version, timeout_s):
            return False
        return self.version == version or not exact

    async def caught_up(self) -> None:
        """Wait until a version is served that was the newest while this waited. Raises LogCorrupt or EngineFailed if
        that is not possible.

        Commits wait for this replica once the ingest knows that it holds a version. Which version is the newest is
        therefore read after the ingest's first answer, or again and again until then.
        """
        enough: int | None = None
        while True:
            is_known = self._answers > 0
            with suppress(NotReady):
                newest = await self._looked()
                if self._life.serves(newest):
                    return
                if is_known and enough is None:
                    enough = newest.version
                # a log that was replaced or rolled back may end before the served version
                if enough is not None and self.version in range(enough, newest.version):
                    return
            self.check_health()
            if self._life.error is not None and self._life.target is None:  # not while it tries another version
                raise LogCorrupt(self._life.error)
            await asyncio.sleep(0.05)

    def check_health(self) -> None:
        """Raise EngineFailed if following has ended. Such a replica would become stale unnoticed."""
        for task in self._tasks:
            if task.done():
                raise EngineFailed(f"replica {self._replica_id} stopped following the log: {task.exception()}")

    def stop(self) -> None:
        """Stop following the log."""
        for task in self._tasks:
            task.cancel()
        self.pausing.stop_waiting()

    async def leave(self) -> None:
        """Stop following the log, and tell the ingest that this replica ends."""
        self.stop()
        with suppress(RolloutServiceError, TimeoutError):  # the ingest will notice by itself
            async with asyncio.timeout(_GOODBYE_S):
                await self._ingest.goodbye(self._replica_id)

    async def _listen(self) -> None:
        while True:
            try:
                desired = await self._ingest.sync(self.status(), self._desired)
            except RolloutServiceError as error:
                poll_s = self._config.poll_s
                logger.warning("the ingest does not answer (%s); reading the log every %s s", error, poll_s)
                await asyncio.sleep(poll_s)
                self._woken.set()
                continue
            self._desired, self._answers = desired, self._answers + 1
            self._woken.set()
            if self._adapters is not None:
                self._adapters.want(desired.adapters)

    async def _act(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            head: Head | None = None
            try:
                await self._obey()
                if self.pausing.asleep:
                    continue
                head = await self._looked()
                await self._follow(head)
            except NotFound as error:  # a newer version was committed and this one removed meanwhile
                logger.info("looking again: %s", error)
                self._woken.set()
            except (LogUnreadable, OSError) as error:
                await self._wait_for_log(head, error)
            except NotReady as error:  # the next poll looks again
                logger.warning("staying at version %s: %s", self.version, error)
                if head is not None or self._life.target is not None:
                    await self._stay(error)
            except (LogCorrupt, InsufficientStorage) as error:
                record(table.UPDATES, outcome="unreadable")
                wait_s = self._corrupt.found(head)
                logger.error("staying at version %s, looking again in %.1f s: %s", self.version, wait_s, error)
                await self._stay(error)

    async def _follow(self, head: Head) -> None:
        """Serve the newest version, unless it could not be read and is tried again later."""
        if self._life.serves(head):
            self._corrupt.forget()
            await self.pausing.open()
            await self._recovered()
        elif not self._corrupt.is_waited_for(head):
            await self._to_version(head)
            await self._obey()
            await self._report()
        elif self._life.target is not None:
            await self._stay(self._life.error)

    async def _wait_for_log(self, head: Head | None, error: Exception) -> None:
        """Keep serving while the file system cannot read the log, or the version ``head``."""
        wait_s = self._corrupt.found(head)
        if self._unreadable.is_news(str(error)):
            logger.error("staying at version %s, looking again: %s", self.version, error)
        if head is not None or wait_s > self._corrupt.first_wait_s:  # a single failure is not reported
            await self._stay(error)

    async def _stay(self, error: Exception | str | None) -> None:
        """Report why a version was not loaded. The engine keeps serving its version, if it has one.

        A ``target`` remains if the log has moved on while rollouts were waited for: the engine is still paused for it.
        """
        if not self._life.closed:
            await self.pausing.open()
        self._life.stays(str(error))
        await self._report()

    async def _recovered(self) -> None:
        """Become ready again: the served version is the newest, and earlier errors of the log are obsolete."""
        if self._life.state != "ready":
            self._life.ready()
            await self._report()

    async def _obey(self, may_sleep: bool = True) -> None:
        desired = self._desired
        if desired is None:
            return
        try:
            has_become = await self.pausing.obey(desired, may_sleep)
        except MemoryTaken as error:
            logger.warning("staying asleep: %s", error)
            self._life.error = str(error)
            has_become = True
        if self.pausing.asleep and desired.asleep:
            self._life.sleeps()
        if has_become:
            await self._report()

    async def _to_version(self, head: Head) -> None:
        self._life.syncs(head.version)
        # also before the first version, because the ingest keeps versions that replicas are loading
        await self._report()
        started = time.perf_counter()
        manifest = await self._staged(head)
        if self.pausing.asleep:
            return
        stage_s = time.perf_counter() - started
        keeps_cache = self._keeps_cache(head, manifest)
        if keeps_cache and self._kv_ages is not None:
            await self._bound_kv_age(self._kv_ages, head.version)
        closed = time.perf_counter()
        if not await self._closed_for(head, clear_cache=not keeps_cache):
            return
        folder = self._log.log.folder(head.version)
        self._life.closed = True
        load_s = await self._engine.load(folder, head.version, keeps_cache)
        self.labels.serve(head)
        if self._kv_cache is not None:
            await self._kv_cache.loaded(head.version, manifest.kv_scales)
        self._cached_of, self._cached_with = self._log.origin, manifest.kv_scales
        self._life.closed = False
        await self.pausing.open()
        update = UpdateTimings(stage_s=stage_s, closed_s=time.perf_counter() - closed, load_s=load_s)
        self._life.updated(head, update)
        await self._moved.notify()
        count_update(update, folder)
        self._log.release_all_but(head.version)
        told = {"weight_version": head.version}
        logger.info("version %d: staged %.3f s, closed %.3f s", head.version, stage_s, update.closed_s, extra=told)

    async def _staged(self, head: Head) -> Manifest:
        """Stage a version; the engine is paused and aborts at once if that is ordered meanwhile, and sleeps at the
        end."""
        staging, is_woken = asyncio.ensure_future(self._log.stage(head, self._engine)), False
        try:
            while not staging.done():
                woken = asyncio.ensure_future(self._woken.wait())
                await asyncio.wait((staging, woken), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if self._woken.is_set() and not staging.done():
                    self._woken.clear()
                    is_woken = True
                    await self._obey(may_sleep=False)  # which would release the memory that is written to
            await self._obey()
            return await staging
        finally:
            staging.cancel()
            if is_woken:
                self._woken.set()  # the log may have another version

    async def _bound_kv_age(self, kv_ages: MonitorCalls, version: int) -> None:
        try:
            async with asyncio.timeout(_MONITOR_S):
                self._engine.bound_kv_age(await kv_ages.kv_max_age(version))
        except (RolloutServiceError, TimeoutError) as error:
            logger.warning("weights.kv_max_age stays for version %d: the monitor does not answer: %s", version, error)

    def _keeps_cache(self, head: Head, manifest: Manifest) -> bool:
        """Return True if running rollouts keep their KV cache when this version is loaded.

        The codes of an FP8 cache are only read with the scales that wrote them, so a version with other scales drops
        the cache. A rollback and a restored log drop it, because the keys and values may be of weights that were
        withdrawn.
        """
        served = self._life.served
        if self._config.kv_cache_on_update == "drop" or served is None or head.version <= served.version:
            return False
        if head.rolled_back_at is not None and head.rolled_back_at > served.version:
            why = f"version {head.rolled_back_at} has restored older weights"
        elif self._log.origin != self._cached_of:
            why = "another ingest writes the log, and may have restored it from a backup"
        elif manifest.kv_scales != self._cached_with:
            why = "its KV scales differ from those of the cache"
        else:
            return True
        logger.warning(
            "version %d drops the KV cache, which weights.kv_cache_on_update would keep: %s", head.version, why
        )
        return False

    async def _closed_for(self, head: Head, clear_cache: bool) -> bool:
        """Pause the engine for a version. Returns False if the log has another version before the last rollout
        finishes, or if the engine sleeps."""
        await self.pausing.close(head.mode, clear_cache)
        while self.pausing.drains():
            await self._woken.wait()
            self._woken.clear()
            await self._obey()
            if self.pausing.asleep:
                return False
            with suppress(NotReady):  # a newer version is unknown
                if await self._looked() != head:
                    self._woken.set()
                    return False
        return True

    async def _looked(self) -> Head:
        await self._log.look()
        self._log.require_the_ingests(None if self._desired is None else self._desired.origin, self._answers)
        return self._log.newest()

    async def _report(self) -> bool:
        """Report to the ingest. Returns False if that failed; the next sync reports again."""
        try:
            async with asyncio.timeout(self._config.poll_s):
                await self._ingest.report(self.status())
        except (RolloutServiceError, TimeoutError) as error:
            logger.warning("could not report to the ingest: %s", error)
            return False
        return True


class _Repeated:
    """A persistent failure, logged at its start, at a change, and once a minute."""

    def __init__(self) -> None:
        self._message, self._said_at = "", 0.0

    def is_news(self, message: str) -> bool:
        """Return True if the message should be logged."""
        now = time.monotonic()
        if message == self._message and now - self._said_at < _REPEAT_S:
            return False
        self._message, self._said_at = message, now
        return True


class _CorruptVersion:
    """A version that could not be read. The wait before the next read doubles each time."""

    def __init__(self, first_wait_s: float) -> None:
        self.first_wait_s = first_wait_s
        self._head: Head | None = None
        self._wait_s = self._retry_at = 0.0

    def found(self, head: Head | None) -> float:
        """Record the failure, and return the seconds until the next read."""
        again = self._wait_s > 0 and self._head == head
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if again else self.first_wait_s
        self._head, self._retry_at = head, time.monotonic() + self._wait_s
        return self._wait_s

    def forget(self) -> None:
        """Forget the version, because the newest one was read."""
        self._head, self._wait_s = None, 0.0

    def is_waited_for(self, head: Head) -> bool:
        return head == self._head and time.monotonic() < self._retry_at
