"""The log as one replica reads it: the ingest's own files, or its node's copies of them."""

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, TypeVar

from rollout_service.errors import LogCorrupt, LogUnreadable, NotFound, NotReady
from rollout_service.protocol.weight_log import Control, Head, Origin
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.store.node_cache import NodeCache

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class StagingEngine(Protocol):
    """What is needed of the engine adapter to have a version beside the one that it serves."""

    async def stage(self, folder: Path, digest: str | None = None) -> None: ...


class FollowedLog:
    """Names the newest version, and has its bytes read and checked. Read anew at each call."""

    def __init__(self, root: Path, copies: NodeCache | None, fingerprint: str) -> None:
        """``copies``: of this node, if it does not see the log. ``fingerprint``: of the model that is served."""
        self._copies, self._fingerprint = copies, fingerprint
        self.log = WeightLog(root) if copies is None else copies.log
        self.origin: Origin | None = None
        """Which log it was when it was looked at last."""
        self._doubted: tuple[Origin, int] | None = None

    async def open(self) -> Control:
        """Wait until there is a version; returns what was last asked of the fleet."""
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
            await asyncio.sleep(0.1)  # the ingest is making version 0

    async def look(self) -> None:
        """Learn what is newest, where only the ingest can say. Raises NotReady if it is away, LogCorrupt."""
        if self._copies is not None:
            await self._copies.look()

    def newest(self) -> Head:
        """The newest version, as of the last look. Raises LogCorrupt."""
        if self._copies is not None:
            return self._copies.newest.head
        head = self.log.head()
        if head is None:
            raise LogCorrupt(f"{self.log.root}/LATEST is gone")
        return head

    def require_the_ingests(self, named: Origin | None, answers: int) -> None:
        """Raise LogCorrupt, or NotReady while that is not certain, unless the ingest writes the log that is read here.

        An ingest that starts on another node with an empty root makes a log of its own.

        Args:
            named: the log that the ingest's last answer named; None: it has not answered yet.
            answers: how many answers have come, this one included.
        """
        self.origin = self._origin_now()
        if self._copies is not None or named is None or named == self.origin:
            self._doubted = None
            return
        # what an ingest that died had said is older than what the next one has signed: a later answer decides
        if self._doubted is None or self._doubted[0] != named:
            self._doubted = named, answers
        if self._doubted[1] == answers:
            raise NotReady(f"the ingest has just restarted, or writes another log than the one at {self.log.root}")
        raise LogCorrupt(
            f"the ingest writes another log now ({named}) than the one at {self.log.root} ({self.origin}), and "
            "nothing of it is loaded here: bring the ingest back to the node with its log, see "
            "weights.ingest_resources, or restart the service"
        )

    async def stage(self, head: Head, engine: StagingEngine) -> Manifest:
        """Have every byte of a version here and next to the model, checked, while the engine serves.

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

    def folder(self, version: int) -> Path:
        """Of a version that was staged."""
        return self.log.folder(version)

    def release_all_but(self, version: int) -> None:
        """Other versions are neither served nor loaded here any more."""
        if self._copies is not None:
            self._copies.release(but=version)

    async def _read(self, head: Head, engine: StagingEngine) -> Manifest:
        """The engine's workers check the tensors as they read them; all else of a version is checked here meanwhile.

        Returns, or raises, once both have ended. What is wrong with the version as a whole is said before what is wrong
        with a tensor.
        """
        manifest, staged = await asyncio.gather(
            self._checked(head, asyncio.to_thread(self._manifest, head)),
            self._checked(head, engine.stage(self.log.folder(head.version), head.digest)),
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

    async def _checked(self, head: Head, reading: Awaitable[_Found]) -> _Found:
        """Raises NotFound, LogCorrupt or LogUnreadable for what cannot be read."""
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
