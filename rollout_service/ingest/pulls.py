"""Pulls versions that a trainer publishes in a folder: the first half of an update for slime and miles."""

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from rollout_service.errors import InvalidRequest, RolloutServiceError
from rollout_service.ingest.stores import is_url
from rollout_service.ingest.trainer_weights import TrainerWeights
from rollout_service.protocol.base import is_label
from rollout_service.protocol.upload import CommitUpload, PullWeights, UploadPlan
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.tasks import RepeatedTask

logger = logging.getLogger(__name__)


class Versions(Protocol):
    """The methods of the ingest that a pull uses; see ``ingest/ingest.py``."""

    async def begin_folder(
        self, path: Path, number: int | None, label: str | None, *, pulled: bool, once: bool
    ) -> UploadPlan: ...
    async def verify(self, version: int) -> None: ...
    async def commit(self, version: int, request: CommitUpload) -> WeightStatus: ...
    async def status(self, version: int) -> WeightStatus: ...


class Pulls:
    """Makes versions of what a trainer publishes, and keeps its weights for the next delta."""

    def __init__(self, ingest: Versions, weights: TrainerWeights) -> None:
        self._ingest, self.weights = ingest, weights
        self._settling: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        """The folder that ``_settling`` keeps."""
        self._released = asyncio.Event()
        """Set unless a published folder is read."""
        self._released.set()

    async def pull_weights(self, request: PullWeights) -> WeightStatus:
        """Commit a published version, or stage and verify it if ``request`` names a local checkpoint.

        Repeating the call has no effect. Raises InvalidDelta for a delta that cannot be applied, and the errors of
        ``Ingest.push_folder``.
        """
        return await self._pull_weights(request, once=False)

    async def _pull_weights(self, request: PullWeights, *, once: bool) -> WeightStatus:
        """Do the same. ``once``: see ``Uploads.begin_folder``."""
        await self.settled()
        try:
            folder = await asyncio.to_thread(self.weights.published, request.store, request.target_version)
            status = await self._pull(folder, request, once=once)
        except InvalidRequest:
            await asyncio.to_thread(self.weights.forget, request.store)
            raise
        self.begin_settling(folder)
        await self.released()
        if request.local_checkpoint_dir is not None:
            await self.settled()  # the push that serves the version would wait for it, with rollouts paused
        return status

    async def _pull(self, folder: Path, request: PullWeights, *, once: bool) -> WeightStatus:
        label = folder.name if is_label(folder.name) else None
        plan = await self._ingest.begin_folder(folder, request.target_version, label, pulled=True, once=once)
        if request.local_checkpoint_dir is None:
            how = CommitUpload(
                mode=request.mode, wait=request.wait, timeout_s=request.timeout_s, upload_digest=plan.upload_digest
            )
            return await self._ingest.commit(plan.version, how)
        await self._ingest.verify(plan.version)
        await asyncio.to_thread(self.weights.name_as, Path(request.local_checkpoint_dir), folder)
        return await self._ingest.status(plan.version)

    def watch(self, store: str, poll_s: float) -> RepeatedTask:
        """Return a task that serves the newest version of a store, looking for one every ``poll_s`` seconds."""
        served: int | None = None

        async def look() -> None:
            nonlocal served
            newest = await asyncio.to_thread(self.weights.newest, store)
            if newest is not None and newest != served:
                folder, uri = (None, store) if is_url(store) else (store, None)
                request = PullWeights(source_dir=folder, uri=uri, target_version=newest, wait="none")
                # once: after a restart, a local rollback from that version stays
                await self._pull_weights(request, once=True)
                served = newest
            await asyncio.sleep(poll_s)

        return RepeatedTask(f"weights.watch={store}", look, poll_s)

    def begin_settling(self, folder: Path) -> None:
        """Keep the version in ``folder`` for the next delta, in the background."""
        if self._settling is not None and not self._settling.done() and self._folder == folder:
            return
        self._folder = folder
        self._released.clear()
        self._settling = asyncio.create_task(self._settle(folder, self._settling))

    async def released(self) -> None:
        """Return once nothing is read from published folders any more: the trainer may delete them."""
        await self._released.wait()

    async def settled(self) -> None:
        """Return once the last version is kept for the next delta."""
        if self._settling is not None:
            await asyncio.shield(self._settling)

    async def _settle(self, folder: Path, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            if await asyncio.to_thread(self.weights.copy_changes, folder):
                self._released.set()
            await asyncio.to_thread(self.weights.settle, folder)
        except (RolloutServiceError, OSError) as error:  # the version does not need it, and the next delta tries again
            logger.warning("the trainer's weights in %s are not kept for the next delta: %s", folder, error)
        except Exception:  # each later pull waits for this one, and would raise the same
            logger.exception("the trainer's weights in %s are not kept for the next delta", folder)
        finally:
            self._released.set()
