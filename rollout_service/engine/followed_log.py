"""The weight log as a replica reads it: the ingest's own files, or its node's copies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from rollout_service.engine.adapter import EngineAdapter
from rollout_service.errors import LogCorrupt, LogUnreadable, NotFound, NotReady
from rollout_service.protocol.weight_log import Control, Head, Origin
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.store.node_cache import NodeCache

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class FollowedLog:
    """Finds the newest version, and has it read and checked. Reads the log again at each call."""

    def __init__(
        self,
        root: Path,
        copies: NodeCache | None,
        fingerprint: str,
        find_pin: Callable[[], Awaitable[Head | None]] | None = None,
    ) -> None:
        """Prepare to read the log.

        Args:
            root: the log's folder.
            copies: this node's copies, if it cannot access the log.
            fingerprint: the fingerprint of the served model.
            find_pin: asks the ingest for the version to which this replica is pinned; None: it is not pinned.
        """
        self._copies, self._fingerprint, self._find_pin = copies, fingerprint, find_pin
        self._pin: Head | None = None
        """The pinned version at the last look. None: the newest version is followed."""
        self.log = WeightLog(root) if copies is None else copies.log
        self.origin: Origin | None = None
        """Identity of the log at the last look."""
        self._doubted: tuple[Origin, int] | None = None

    async def open(self) -> Control:
        """Wait for the first version, and return the last command to the fleet."""
        told = ""
        while True:
            try:
                if self._copies is not None or self.log.head() is not None:
                    self.origin = self._origin_now()
                    return self.log.control() if self._copies is None else self._copies.newest.control
            except LogUnreadable as error:
                if told != error.message:
                    told = error.message
                    logger.warning("waiting for the log: %s", error)
            await asyncio.sleep(0.1)  # the ingest is creating version 0

    async def look(self) -> None:
        """Update the pinned version and the copies' state from the ingest. Does nothing without both. Raises NotReady,
        LogCorrupt."""
        await self.find_pin()
        if self._copies is not None:
            await self._copies.look()

    async def find_pin(self) -> None:
        """Update the pinned version from the ingest, if this replica is pinned. Raises NotReady, LogCorrupt."""
        if self._find_pin is not None:
            self._pin = await self._find_pin()

    def newest(self) -> Head:
        """Return the pinned or else the newest version as of the last look. Raises LogCorrupt."""
        if self._pin is not None:
            return self._pin
        if self._copies is not None:
            return self._copies.newest.head
        head = self.log.head()
        if head is None:
            raise LogCorrupt(f"{self.log.root}/LATEST is gone")
        return head

    def require_the_ingests(self, named: Origin | None, answers: int) -> None:
        """Check that the ingest writes the log that this replica reads. Raises LogCorrupt, or NotReady while that is
        unclear.

        An ingest that starts on another node with an empty root creates a new log.

        Args:
            named: the log in the ingest's last answer. None: it has not answered yet.
            answers: number of answers so far, including this one.
        """
        self.origin = self._origin_now()
        if self._copies is not None or named is None or named == self.origin:
            self._doubted = None
            return
        # the last answer may come from an ingest that died since, so only a later answer decides
        if self._doubted is None or self._doubted[0] != named:
            self._doubted = named, answers
        if self._doubted[1] == answers:
            raise NotReady(f"the ingest has just restarted, or writes another log than the one at {self.log.root}")
        raise LogCorrupt(
            f"the ingest writes another log now ({named}) than the one at {self.log.root} ({self.origin}), and "
            "nothing of it is loaded here: bring the ingest back to the node with its log, see "
            "weights.ingest_resources, or restart the service"
        )

    async def stage(self, head: Head, engine: EngineAdapter) -> Manifest:
        """Copy and check every byte of a version, and stage it in the engine, which keeps serving.

        Raises NotFound, NotReady, LogCorrupt, InsufficientStorage, EngineFailed.
        """
        if self._copies is None:
            return await self._read(head, engine)
        await self._copies.fetch(head)
        try:
            return await self._read(head, engine)
        except LogCorrupt as error:
            logger.warning("fetching version %d anew: %s", head.version, error)
            await self._copies.forget(head.version)
            await self._copies.fetch(head)
            return await self._read(head, engine)

    def release_all_but(self, version: int) -> None:
        """Allow the deletion of the copies of other versions."""
        if self._copies is not None:
            self._copies.release(but=version)

    async def _read(self, head: Head, engine: EngineAdapter) -> Manifest:
        """Read a version. The engine's workers check the tensors while this process checks everything else.

        Returns or raises once both have ended. An error in the version as a whole takes precedence over an error in a
        tensor.
        """
        manifest, staged = await asyncio.gather(
            self._read_checked(head, asyncio.to_thread(self._manifest, head)),
            self._read_checked(head, engine.stage(self.log.folder(head.version), head.digest)),
            return_exceptions=True,
        )
        if isinstance(manifest, BaseException):
            raise manifest
        if isinstance(staged, BaseException):
            raise staged
        return manifest

    def _manifest(self, head: Head) -> Manifest:
        manifest = self.log.manifest(head.version, head.digest)
        if manifest.fingerprint != self._fingerprint:
            raise LogCorrupt(f"version {head.version} in {self.log.root} belongs to another model")
        self.log.verify_frame(manifest)
        return manifest

    async def _read_checked(self, head: Head, reading: Awaitable[_Found]) -> _Found:
        """Await ``reading``. Raises NotFound, LogCorrupt or LogUnreadable if the version cannot be read."""
        try:
            return await reading
        except (OSError, LogCorrupt) as error:
            if head.version not in self.log.versions():
                raise NotFound(f"version {head.version} was removed while it was read") from error
            if isinstance(error, LogCorrupt):
                raise
            kind = LogCorrupt if isinstance(error, FileNotFoundError) else LogUnreadable
            raise kind(f"version {head.version} cannot be read: {error}") from error

    def _origin_now(self) -> Origin | None:
        return self.log.origin() if self._copies is None else self._copies.newest.origin
