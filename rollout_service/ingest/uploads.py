"""The staged versions: begun or resumed, recovered after a restart, dropped when their uploader does not return."""

import asyncio
import logging
import os
import time
import uuid
from pathlib import Path

from rollout_service.config import WeightsConfig
from rollout_service.errors import (
    InsufficientStorage,
    InvalidRequest,
    LogCorrupt,
    LogUnreadable,
    NotFound,
    RolloutServiceError,
    VersionConflict,
)
from rollout_service.ingest.own_log import VersionNumbers, require_same_upload
from rollout_service.ingest.resources import KEPT_FILE, Resources
from rollout_service.ingest.sources.delta import DeltaOfVersion
from rollout_service.ingest.sources.delta_folder import DeltaFolder, is_delta
from rollout_service.ingest.sources.folder import allowed_path
from rollout_service.ingest.sources.shared_memory import TrainerMemory, shared_buckets
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.ingest.trainer_weights import TrainerWeights
from rollout_service.ingest.upload_session import UploadSession, parts_folder
from rollout_service.model.convert import Converter
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.base import NEXT
from rollout_service.protocol.upload import (
    Announcement,
    BeginUpload,
    BroadcastSource,
    PathSource,
    SharedMemorySource,
    SharedTensors,
    UploadPlan,
)
from rollout_service.store.durable_io import not_written, remove_tree
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Recipe
from rollout_service.store.upload_record import UploadRecord, read_record, source_stamp

logger = logging.getLogger(__name__)
_GRACE = 0.25
"""Share of ``weights.staged_ttl_s`` after the ingest's start in which nothing expires."""
_MOST_DROPPED = 100
"""Number of versions whose reason for being dropped is remembered."""


class Uploads:
    """All staged versions of one log. Its coroutines must not run concurrently."""

    def __init__(
        self,
        config: WeightsConfig,
        log: WeightLog,
        model: ServedModel,
        plan: QuantPlan,
        converter: Converter,
        recipe: Recipe,
        labels: VersionLabels,
    ) -> None:
        """
        Args:
            recipe: the recipe that the converter follows, as stored in versions.
            labels: the log's labels, for messages.
        """
        self.numbers = VersionNumbers(log, labels)
        self._config, self._log, self._model, self._plan, self._recipe = config, log, model, plan, recipe
        self.resources = Resources(config, log, model, converter)
        registered = self.resources.registered
        self._trainer_memory = TrainerMemory(registered)
        kept = config.trainer_root or log.root / "trainer"
        self.trainer_weights = TrainerWeights(
            kept, model.path, config.source_roots, config.source_urls, model.ignored, registered
        )
        self._staged: dict[int, UploadSession] = {}
        self._committed: dict[int, UploadRecord] = {}
        self._dropped: dict[int, str] = {}
        self._started_at = time.monotonic()

    @property
    def staged_versions(self) -> list[int]:
        """Return the staged versions, in no particular order."""
        return list(self._staged)

    @property
    def needed(self) -> set[int]:
        """Return the base versions of staged deltas."""
        return {staged.needs for staged in self._staged.values() if staged.needs is not None}

    def staged(self, version: int) -> UploadSession:
        """Return the upload of ``version``. Raises NotFound, with the reason if the service has dropped it."""
        if version not in self._staged:
            why = self._dropped.get(version)
            dropped = "" if why is None else f"; what was staged of it was dropped: {why}"
            raise NotFound(
                f"version {version} is not staged (staged: {sorted(self._staged)}){dropped}: POST /v1/weights first",
                {"version": version, "staged": sorted(self._staged)},
            )
        return self._staged[version]

    def why_dropped(self, version: int) -> str | None:
        """Return the reason why a staged version was dropped; None: it was not, or its trainer dropped it."""
        return self._dropped.get(version)

    def require_newer(self, version: int) -> None:
        """Raise VersionConflict unless ``version`` is above the newest one, with the reason if it was staged."""
        try:
            self.numbers.require_newer(version)
        except VersionConflict as error:
            if (why := self._dropped.get(version)) is None:
                raise
            what = f"version {version} is not newer than the newest committed version {self.numbers.newest}"
            raise VersionConflict(f"{what}: {why}", error.detail) from error

    def _note_dropped(self, version: int, why: str) -> None:
        logger.warning("staged version %d is dropped: %s", version, why)
        self._dropped = {**dict(list(self._dropped.items())[1 - _MOST_DROPPED :]), version: why}

    async def committed(self, version: int) -> UploadRecord | None:
        """Return the record of a committed version; None if it is not in the log, or the log has no record of it.

        Raises LogCorrupt or LogUnreadable.
        """
        if version not in self._log.versions():
            return None
        if version not in self._committed:
            try:
                record = await asyncio.to_thread(read_record, self._log.folder(version))
            except OSError as error:
                raise LogUnreadable(f"version {version}'s record cannot be read: {error}; send it again") from error
            if record is None:
                return None
            self._committed = {version: record, **dict(list(self._committed.items())[:3])}
        return self._committed[version]

    async def committed_if_readable(self, version: int) -> UploadRecord | None:
        """Return the record of a committed version; None also if it cannot be read."""
        try:
            return await self.committed(version)
        except (LogCorrupt, LogUnreadable) as error:
            logger.warning("how version %d came is not shown: %s", version, error)
            return None

    async def begin(self, announced: Announcement) -> UploadPlan:
        """Start or resume an upload. If the same version is staged or committed, return its plan.

        ``next`` is given a number: see ``protocol/upload.py``.

        Raises VersionConflict, InvalidRequest, InvalidManifest, NotFound, and others.
        """
        begin = self._numbered(announced)
        if isinstance(begin.source, PathSource):
            # only once: at the commit, a link in it may lead elsewhere
            folder = await asyncio.to_thread(allowed_path, begin.source.path, self._config.source_roots)
            begin = begin.model_copy(update={"source": PathSource(path=folder)})
        if isinstance(begin.source, SharedMemorySource):
            await self._drop_abandoned()
            # before another upload is replaced, so that a refused call has no effect
            await self._trainer_memory.hold(begin.source)
            self._trainer_memory.release(begin.source)
        known = await self.committed(begin.version)
        if known is not None:
            stamp = await asyncio.to_thread(self._stamp_of, begin) if known.begin.describes_what(begin) else None
            require_same_upload(known, begin, stamp, self._log.head())
            return self._plan_of(known)
        self.numbers.require_newer(begin.version)
        staged = await self._take_over(begin) or await self._stage_announced(begin)
        return self._plan_of(staged.record, staged)

    async def _take_over(self, begin: BeginUpload) -> UploadSession | None:
        """Return the unfinished upload of the same content, which now is that of this announcement; None: there is
        none."""
        staged = self._staged.get(begin.version)
        if staged is None or staged.failure is not None or not staged.begin.describes_what(begin):
            return None
        stamp = await asyncio.to_thread(self._stamp_of, begin)
        if stamp is not None and stamp != staged.record.source_stamp:
            return None
        staged.touched_at = time.monotonic()
        label = begin.label or staged.begin.label
        if (begin.uploader, label) != (staged.begin.uploader, staged.begin.label):
            await self.rename(staged, uploader=begin.uploader, label=label)
        return staged

    def _numbered(self, announced: Announcement) -> BeginUpload:
        """Return the announcement with its number: the given one, the one that this push had before, or the next
        one."""
        if announced.version != NEXT:
            return announced.numbered(announced.version)
        for version, staged in self._staged.items():
            if announced.uploader and announced.uploader == staged.begin.uploader:
                return announced.numbered(version)
        for version, staged in self._staged.items():
            if announced.label is not None and announced.label == staged.begin.label:
                return announced.numbered(version)
        return announced.numbered(self._next_number())

    def _next_number(self) -> int:
        """Return the first number above all committed and staged ones. Raises VersionConflict if there is none."""
        return self.numbers.after(version for version, staged in self._staged.items() if staged.failure is None)

    async def begin_folder(
        self,
        path: Path,
        number: int | None = None,
        label: str | None = None,
        *,
        pulled: bool = False,
        once: bool = False,
        kv_scales: dict[str, float] | None = None,
    ) -> UploadPlan:
        """Stage a folder's contents as the next version, unless they are already staged or the newest version.

        Contents are the same if the resolved path and the names, sizes and times of its files are. The log keeps a hash
        of these. An upload from the same path whose files have changed since is dropped.

        ``number``: the trainer's number, used if it is free and above the newest version's; otherwise, the version gets
        the next free number. ``label``: an additional name. ``pulled``: ``path`` is one of
        ``TrainerWeights.published``, and is kept for later deltas. ``once``: also compare the older kept versions.
        ``kv_scales``: those of the version.

        Return its plan. Raises Forbidden, NotFound, InvalidRequest, InvalidManifest or VersionConflict.
        """
        folder = path if pulled else allowed_path(path, self._config.source_roots)
        source = await asyncio.to_thread(self.trainer_weights.source_of, folder, keep=pulled)
        same = PathSource(path=folder)
        for version, staged in list(self._staged.items()):
            if staged.begin.source == same:
                if staged.failure is None and staged.record.source_stamp == source.stamp:
                    staged.touched_at = time.monotonic()
                    return self._plan_of(staged.record, staged)
                await asyncio.to_thread(self._model.check_table, source.table, self._plan)
                await self.discard(version)
        newest = self.numbers.newest
        for version in reversed(self._log.versions()) if once else (newest,):
            known = await self.committed_if_readable(version)
            if known is not None and known.begin.source == same and known.source_stamp == source.stamp:
                return self._plan_of(known)
        other = None if number is None else self._staged.get(number)
        if number is None or number <= newest or (other is not None and other.failure is None):
            number = self._next_number()
        begin = BeginUpload(version=number, source=same, label=label, kv_scales=kv_scales)
        staged = await self.stage(begin, source)
        return self._plan_of(staged.record, staged)

    async def begin_broadcast(self) -> UploadSession:
        """Stage the next version, for tensors that come through ``UploadSession.convert``.

        Its table is not known yet, so the caller of ``convert`` checks tensors. Raises InsufficientStorage.
        """
        begin = BeginUpload(version=self._next_number(), source=BroadcastSource(transfer=uuid.uuid4().hex))
        return await self.stage(begin, None)

    def require_staged(self, staged: UploadSession) -> None:
        """Raise NotFound unless exactly this upload is staged under its number."""
        version = staged.begin.version
        if self.staged(version) is not staged:
            raise NotFound(
                f"version {version} is staged by somebody else now: begin anew, under another number",
                {"version": version},
            )

    async def renumber(self, staged: UploadSession, version: int) -> None:
        """Change a staged version's number. Raises VersionConflict if the new one is staged or committed, NotFound."""
        self.require_staged(staged)
        before = staged.begin.version
        if version == before:
            return
        self.numbers.require_newer(version)
        if version in self._staged:
            raise VersionConflict(
                f"version {version} is being uploaded by somebody else: DELETE it, or name another",
                {"version": version, "staged": sorted(self._staged)},
            )
        try:
            await asyncio.to_thread(staged.renumber, version, self._log.staging(version))
        except OSError as error:
            raise not_written(f"version {before} cannot be made version {version}", error, "commit it again") from error
        self._staged[version] = self._staged.pop(before)

    @staticmethod
    async def rename(staged: UploadSession, **changes: str | None) -> None:
        """Change the uploader or label of a staged version. Raises RolloutServiceError if the disk fails."""
        try:
            await asyncio.to_thread(lambda: staged.rename(**changes))
        except OSError as error:
            raise not_written(f"version {staged.begin.version} cannot be renamed", error, "push it again") from error

    async def stage(self, begin: BeginUpload, source: WeightSource | None) -> UploadSession:
        """Lay out a version that expects parts, or convert the tensors of ``source``. Replaces another upload.

        Raises InvalidManifest or DeltaBaseGone, and then replaces nothing; InsufficientStorage or RolloutServiceError.
        """
        delta = await asyncio.to_thread(self._checked, begin, source)
        try:
            if (before := self._staged.pop(begin.version, None)) is not None:
                await before.discard()
            folder = self._log.staging(begin.version)
            staged = await asyncio.to_thread(UploadSession, begin, folder, self.resources, source, delta)
        except BaseException as error:
            if delta is not None:
                delta.close()
            if not isinstance(error, OSError):
                raise
            what = f"version {begin.version} cannot be staged in {uploads_folder(self._log.root)}"
            raise not_written(what, error, "push it again") from error
        self._staged[begin.version] = staged
        self._dropped.pop(begin.version, None)
        return staged

    def _checked(self, begin: BeginUpload, source: WeightSource | None) -> DeltaOfVersion | None:
        """Compare the announced tensors with the model, and those of a delta with its base, which is opened."""
        if source is not None:
            self._model.check_table(source.table, self._plan)
        elif not isinstance(begin.source, BroadcastSource):
            table = begin.announced_tensors
            self._model.check_table(table, self._plan)
            if left_out := self._model.ignored.summary(tensor.name for tensor in table):
                logger.info("version %d: %s", begin.version, left_out)
        if begin.delta is None:
            return None
        memory = self.resources.memory
        mapped = None if memory is None else memory.mapped
        return DeltaOfVersion(self._log, begin, self._recipe, self.resources.converter, mapped)

    async def discard(self, version: int) -> None:
        """Drop a staged version. Raises NotFound."""
        staged = self.staged(version)
        del self._staged[version]
        await staged.discard()

    async def drop(self, staged: UploadSession) -> None:
        """Discard exactly this upload, if it is still staged."""
        if self._staged.get(staged.begin.version) is staged:
            await self.discard(staged.begin.version)

    async def committed_now(self, version: int) -> None:
        """Clean up after a commit: remove the rest of the upload, and older staged versions."""
        staged = self._staged.pop(version)
        await asyncio.to_thread(staged.committed)
        await self.overtaken_by(version)

    async def overtaken_by(self, version: int) -> None:
        """Drop staged versions with lower numbers than a committed version."""
        for older in [v for v in self._staged if v < version]:
            why = (
                f"version {version} is committed, and versions only grow: push it again as version {NEXT!r}, "
                "and await each push before the next"
            )
            self._note_dropped(older, why)
            await self._staged.pop(older).discard()

    async def recover(self) -> None:
        """Resume what an earlier ingest had staged; remove what can no longer be committed."""
        staging = uploads_folder(self._log.root)
        there = sorted(staging.iterdir()) if staging.is_dir() else []
        folders = [path for path in there if path.name[0].isdecimal() or path.name == KEPT_FILE]  # not those of others
        for parts in (path for path in folders if path.name.endswith(".parts")):
            await self._recover(parts)
        # layouts are rebuilt from the parts; all other files are left over
        kept = {path.name for v in self._staged for path in (self._log.staging(v), parts_folder(self._log.staging(v)))}
        for path in folders:
            # parts for whose version the disk has no room stay
            is_left_over = not path.name.endswith(".parts") or os.path.islink(path) or os.path.isfile(path)
            if path.name not in kept and is_left_over:
                await asyncio.to_thread(remove_tree, path)

    async def take_shared(self, version: int, batch: SharedTensors) -> None:
        """Convert tensors in a trainer's memory. Raises NotFound, VersionConflict, InvalidRequest, or the error of the
        first failed conversion."""
        staged = self.staged(version)
        source = staged.begin.source
        if not isinstance(source, SharedMemorySource) or source.transfer != batch.transfer:
            raise VersionConflict(
                f"version {version} is staged by another push than {batch.transfer}: push version {NEXT!r}",
                {"version": version},
            )
        memory = await self._trainer_memory.hold(source)
        try:
            buckets = list(shared_buckets(staged.begin.announced_tensors, batch, memory))
            converting = staged.convert_shared(batch.batch, buckets)
        except BaseException:
            self._trainer_memory.release(source)
            raise
        converting.add_done_callback(lambda _: self._trainer_memory.release(source))  # also if the caller has left
        await asyncio.shield(converting)

    async def expire(self) -> None:
        """Drop uploads without activity for too long, or whose trainer has released its memory or has ended."""
        await self._drop_abandoned()
        for version, staged in list(self._staged.items()):
            now = time.monotonic()
            # The age of recovered parts comes from file times, and the wall clock may have been set since. Their sender
            # therefore has some time to return.
            since_start = self._started_at + self._config.staged_ttl_s * _GRACE
            if now - staged.touched_at > self._config.staged_ttl_s and now >= since_start:
                await self.discard(version)
                self._note_dropped(
                    version,
                    f"nothing came for {now - staged.touched_at:.0f} s "
                    f"(weights.staged_ttl_s={self._config.staged_ttl_s:g}); it lacked {len(staged.parts.missing)} of "
                    f"{staged.record.num_parts} parts",
                )

    async def _drop_abandoned(self) -> None:
        """Release the memory that trainers have given up, and drop the versions that lack tensors of it."""
        for version, staged in list(self._staged.items()):
            source = staged.begin.source
            if not staged.lacks_tensors or not isinstance(source, SharedMemorySource):
                continue
            if not await asyncio.to_thread(self._trainer_memory.is_there, source):
                await self.discard(version)
                why = f"process {source.process}, whose memory its tensors come from, has released it or has ended"
                self._note_dropped(version, f"{why}: push it again")
        await asyncio.to_thread(self._trainer_memory.prune)

    async def close(self) -> None:
        """Stop converting and close every file; staged versions stay on disk for the next ingest."""
        for staged in self._staged.values():
            await staged.close()
        self.resources.close()
        self._trainer_memory.close()
        self.trainer_weights.close()

    async def _stage_announced(self, begin: BeginUpload) -> UploadSession:
        return await self.stage(begin, await asyncio.to_thread(self.source_of, begin))

    def source_of(self, begin: BeginUpload) -> WeightSource | None:
        """Return a reader of the announced source; None: the tensors come in parts."""
        if isinstance(begin.source, BroadcastSource):
            raise InvalidRequest(
                "what a trainer broadcasts cannot be read again, and is begun by POST /start_weight_update: give a "
                "path or tensors"
            )
        if begin.source is None or isinstance(begin.source, SharedMemorySource):
            return None
        return self.trainer_weights.source_of(allowed_path(begin.source.path, self._config.source_roots))

    async def _recover(self, parts: Path) -> None:
        number = parts.name.removesuffix(".parts")
        try:
            record = await asyncio.to_thread(read_record, parts)
            if record is None:
                raise LogCorrupt(f"{parts} holds no record")
            version = record.begin.version
            self.numbers.require_newer(version)
            if isinstance(record.begin.source, SharedMemorySource):
                raise InvalidRequest("what a trainer has shared cannot be read again: push it anew")
            staged = await self._stage_announced(record.begin)
        except (RolloutServiceError, OSError) as error:  # an unreadable upload must not keep the ingest from starting
            if isinstance(error, InsufficientStorage | LogUnreadable):
                logger.error("%s stays on disk until its upload is begun again: %s", parts, error)
                return
            if number.isdecimal():
                self._note_dropped(int(number), f"{parts} cannot be taken up again: {error}")
            await asyncio.to_thread(remove_tree, parts)
        else:
            logger.info(
                "version %d is staged still, and lacks %d of %d parts",
                version,
                len(staged.parts.missing),
                staged.record.num_parts,
            )

    def _stamp_of(self, begin: BeginUpload) -> str | None:
        """Return the present stamp of an announced path; None: of another source."""
        if not isinstance(begin.source, PathSource):
            return None
        folder = begin.source.path
        return DeltaFolder(folder, self._config.source_roots).stamp if is_delta(folder) else source_stamp(folder)

    def _plan_of(self, record: UploadRecord, staged: UploadSession | None = None) -> UploadPlan:
        """Return the reply to ``begin``; ``staged``: None if it is committed."""
        return UploadPlan(
            version=record.begin.version,
            state="committed" if staged is None else "staged",
            part_bytes=record.part_bytes,
            num_parts=record.num_parts,
            missing_parts=() if staged is None else tuple(sorted(staged.parts.missing)),
            digests=dict(enumerate(record.part_digests)) if staged is None else dict(staged.parts.digests),
            upload_digest=record.upload_digest if isinstance(record.begin.source, PathSource) else None,
        )
