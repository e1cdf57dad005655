"""Durability of versions: when a version counts as durable, and how it becomes durable. See ``weights.durability``.

    before_live, log on a disk    at the commit: everything is synced before LATEST names the version
    before_live, log in memory    never: the log is lost with the machine
    behind                        once it is copied to the second log, on a disk (``store/durable_log.py``). Versions
                                  are copied one at a time: first those that a caller waits for, oldest first, then
                                  the newest. A version that a newer one overtakes first is never durable.

All needed state is in the two logs, so an ingest that restarts continues where the previous one ended.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from rollout_service.config import WeightsConfig
from rollout_service.errors import CommitTimeout, InvalidRequest, LogCorrupt, NotFound, NotReady, RolloutServiceError
from rollout_service.metrics.state import folder_bytes, free_bytes
from rollout_service.protocol.base import Failure
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.state import DurableState
from rollout_service.protocol.upload import HowToLoad
from rollout_service.protocol.weight_log import Head
from rollout_service.runtime.tasks import Changes
from rollout_service.runtime.threads import to_thread_and_back
from rollout_service.store.durable_io import DISK_FULL, no_room
from rollout_service.store.durable_log import CopyStopped, DurableLog, require_behind
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, ManifestDamaged
from rollout_service.store.mapped_files import is_in_memory
from rollout_service.store.served_numbers import ServedNumbers
from rollout_service.store.upload_record import UploadRecord
from rollout_service.store.version_summary import unconfirmed

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Time in seconds after which a failed copy is tried again, if no new version comes before."""


class Durability:
    """Durability of the versions of one log. Lives in the ingest's event loop; call ``recover`` and ``commit`` in
    threads."""

    def __init__(
        self,
        config: WeightsConfig,
        log: WeightLog,
        changes: Changes,
        copied: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            log: the log of the served versions.
            changes: notified when a version has become durable, or when its copy has failed.
            copied: called when a version is no longer needed for its copy.
        """
        self._lock_wait_s = config.lock_wait_s
        self._log, self._changes, self._copied = log, changes, copied
        durable_root = config.durable_root_here()
        self.disk = None if durable_root is None else DurableLog(durable_root, log, config.keep_versions)
        """The second log, on a disk; None: there is none."""
        self.served = ServedNumbers(log) if self.disk is None else self.disk.served
        self._in_memory = False
        self._newest = -1
        self._copying: int | None = None
        self._wanted: Counter[int] = Counter()
        self._failed: tuple[int, Exception] | None = None
        self._given_up: dict[int, RolloutServiceError] = {}
        self._never = 0
        self._wake, self._stop = asyncio.Event(), threading.Event()
        self._task: asyncio.Task[None] | None = None

    # --- when the ingest starts and ends

    def acquire(self) -> None:
        """Become the only writer of the second log. Raises LogLocked, OSError, or the errors of ``require_behind``."""
        if self.disk is not None:
            self.disk.acquire(self._lock_wait_s)
            require_behind(self._log.root, self.disk.log.root)

    def recover(self) -> None:
        """See ``DurableLog.recover``."""
        self._in_memory = is_in_memory(self._log.root)
        if self.disk is None:
            self.served.load()
        else:
            self.disk.recover()

    def start(self) -> None:
        """Start to copy versions."""
        if self.disk is not None:
            self._task = asyncio.create_task(self._copy_versions())
            self._task.add_done_callback(_log_its_end)

    async def close(self, within_s: float) -> None:
        """Try to copy the newest version within ``within_s`` seconds; then stop copying and release the second log.

        May be called again.
        """
        if self._task is not None:
            with suppress(NotReady):
                await self._changes.wait(self._done_or_stuck, within_s)
            self._stop.set()
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self.disk is not None:
            self.disk.release()

    def _done_or_stuck(self) -> bool:
        return self._next() is None or (self._failed is not None and self._copying is None)

    def check_health(self) -> None:
        """Raise RolloutServiceError if the copying task has ended, since versions would silently never become
        durable."""
        if self._task is not None and self._task.done():
            raise RolloutServiceError("no version becomes durable any more: the task that copies them has ended")

    # --- a commit

    def commit(self, manifest: Manifest, mode: PauseMode, record: UploadRecord | None) -> Head:
        """Record the version's digest, then call ``WeightLog.commit``.

        Raises VersionConflict if the number has another digest, InsufficientStorage, RolloutServiceError if the digest
        cannot be recorded, or OSError, as ``WeightLog.commit``.
        """
        self.served.require(manifest.version, manifest.digest)
        if self.disk is None:
            return self._log.commit(manifest, mode, record)
        self._note(manifest)
        try:
            return self._log.commit(manifest, mode, record)
        except OSError:
            try:
                self.served.forget(manifest.version)
            except OSError as error:
                logger.warning("version %d is not committed, and keeps its digest: %s", manifest.version, error)
            raise

    def _note(self, manifest: Manifest) -> None:
        assert self.disk is not None
        version, root = manifest.version, self.disk.log.root
        try:
            self.served.note(version, manifest.digest)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise no_room(f"the number of version {version}, which is not committed,", root, 1 << 10) from error
            raise RolloutServiceError(
                f"version {version} is not committed, because its number cannot be noted in {root}: {error}: commit it "
                "again"
            ) from error

    def committed(self, version: int) -> None:
        """Note that this version is now the newest served one."""
        self._newest = version
        self._wake.set()

    def dropped(self, version: int) -> None:
        """Note that this version is no longer served."""
        self._given_up.pop(version, None)
        if self.disk is not None and version not in self.disk.versions:
            self._never += 1
            logger.info("version %d was overtaken before it was on the disk, and is not durable any more", version)

    # --- what is asked

    @property
    def needed(self) -> set[int]:
        """Return the versions that must not be dropped."""
        return {*self._wanted, *(() if self._copying is None else (self._copying,))}

    def is_durable(self, version: int) -> bool:
        """Return True if a committed version survives the loss of its machine."""
        if self.disk is not None:
            return version in self.disk.versions
        return not self._in_memory and version not in self._log.unconfirmed

    def failure(self, version: int) -> Failure | None:
        """Return the error because of which a committed version is not durable, if there is one."""
        if self.disk is None:
            return unconfirmed(self._log.unconfirmed.get(version))
        error: Exception | None = self._given_up.get(version)
        if error is None and self._failed is not None and self._failed[0] == version:
            error = self._failed[1]
        if error is None:
            return None
        again = "it is not tried again" if version in self._given_up else "it is tried again"
        message = f"served, but not durable, because it cannot be copied to {self.disk.log.root} ({error}): {again}"
        return Failure(type=type(error).__name__, message=message)

    def state(self) -> DurableState | None:
        """Return the state for metrics; None if versions never become durable here. Reads folders."""
        if self.disk is None:
            if self._in_memory:
                return None
            durable = [version for version in self._log.versions() if version not in self._log.unconfirmed]
            return DurableState(version=max(durable, default=None))
        root = self.disk.log.root
        return DurableState(
            version=self.disk.newest,
            never_durable=self._never,
            log_bytes=folder_bytes(root),
            log_free_bytes=free_bytes(root),
        )

    # --- waiting

    def require_possible(self, request: HowToLoad) -> None:
        """Raise InvalidRequest if the request would wait forever."""
        if request.wait == "durable" and self.disk is None and self._in_memory:
            raise InvalidRequest(
                f"no version becomes durable here: the log at {self._log.root} is in memory, and gone with the "
                "machine. Nothing was committed: ask again with wait 'all' or 'none', or set weights.durability: "
                "behind and weights.durable_root"
            )

    @contextmanager
    def wanted(self, version: int, request: HowToLoad) -> Iterator[None]:
        """Keep the version from being overtaken within this context, if the request waits for its durability."""
        if request.wait != "durable":
            yield
            return
        self._wanted[version] += 1
        try:
            yield
        finally:
            self._wanted[version] -= 1
            self._wanted += Counter()  # drop zero counts

    async def wait(self, version: int, timeout_s: float) -> None:
        """Return once a committed version is durable; call it within ``wanted``.

        Raises CommitTimeout with the disk's error, LogCorrupt if the version is damaged in memory, NotFound if it is
        gone.
        """
        self._wake.set()
        reached = await self._changes.wait(lambda: self.is_durable(version) or version in self._given_up, timeout_s)
        if version in self._given_up:
            raise self._given_up[version]
        if not reached:
            root = self._log.root if self.disk is None else self.disk.log.root
            failed = self.failure(version)
            why = "" if failed is None else f" ({failed.message})"
            raise CommitTimeout(
                f"version {version} is committed, but after {timeout_s} s it is not durable in {root}{why}; GET "
                f"/v1/weights/{version} says when it is",
                {"version": version},
            )

    # --- copying

    async def _copy_versions(self) -> None:
        while True:
            self._wake.clear()
            version = self._next()
            if version is None:
                await self._wake.wait()
            elif await self._copy(version):
                try:
                    await self._copied()
                except (OSError, RolloutServiceError) as error:  # the next version's copy removes them
                    logger.error("version %d is durable, and no older one was removed for it: %s", version, error)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._wake.wait()

    def _next(self) -> int | None:
        assert self.disk is not None
        done = self.disk.versions | self._given_up.keys()
        waited_for = sorted(version for version in self._wanted if version <= self._newest and version not in done)
        if waited_for:
            return waited_for[0]
        return None if self._newest < 0 or self._newest in done else self._newest

    async def _copy(self, version: int) -> bool:
        assert self.disk is not None
        self._copying = version
        try:
            await to_thread_and_back(self.disk.copy, version, self._stop.is_set)
        except CopyStopped:
            return False
        except (LogCorrupt, NotFound) as error:
            logger.error("version %d is damaged in memory, or gone, and is never durable: %s", version, error)
            self._given_up[version] = error
        except (OSError, RolloutServiceError, ManifestDamaged) as error:
            logger.error("version %d is served, and is not durable yet: %s", version, error)
            self._failed = version, error
        except Exception as error:  # an uncaught error would end the task that copies later versions
            logger.exception("version %d is served, and is not durable yet", version)
            self._failed = version, error
        else:
            self._failed = None
            logger.info("version %d is durable", version, extra={"weight_version": version})
        finally:
            self._copying = None
            await self._changes.notify()
        return self._failed is None


def _log_its_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("no version becomes durable any more, until the ingest is restarted", exc_info=error)
