"""The staged versions: begun or resumed, recovered after a restart, dropped when their uploader does not return."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from rollout_service.config import WeightsConfig
from rollout_service.errors import (
    InsufficientStorage,
    InvalidRequest,
    LogCorrupt,
    NotFound,
    RolloutServiceError,
    VersionConflict,
)
from rollout_service.gpu.pinning import pin, pin_if_possible
from rollout_service.ingest.announced_tables import AnnouncedTables
from rollout_service.ingest.conversion import GPU
from rollout_service.ingest.sources.delta import DeltaOfVersion
from rollout_service.ingest.sources.folder import FolderSource, allowed_path
from rollout_service.ingest.sources.shared_memory import (
    GPU_THREADS,
    GpuMemory,
    MappedMemory,
    SharedBatch,
    TrainerMemory,
)
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.ingest.upload_session import Resources, UploadSession, parts_folder
from rollout_service.model.convert import Converter
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.base import MAX_VERSION, NEXT
from rollout_service.protocol.upload import (
    Announcement,
    BeginUpload,
    BroadcastSource,
    ObjectSource,
    PathSource,
    SharedMemorySource,
    SharedTensors,
    UploadPlan,
    with_kv_scales,
)
from rollout_service.runtime.threads import io_threads
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.labels import VersionLabels
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Recipe
from rollout_service.store.mapped_files import Registered
from rollout_service.store.staged_file import StagingSpace
from rollout_service.store.upload_record import UploadRecord, read_record, source_stamp
from rollout_service.store.writer import LogMemory

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

logger = logging.getLogger(__name__)
_GRACE = 0.25
"""Share of ``weights.staged_ttl_s`` after the ingest's start in which nothing expires."""
_MOST_DROPPED = 100
"""Number of versions whose reason for being dropped is remembered."""
_KEPT_FILE = "kept"
"""File beside the folders of staged versions: see ``StagingSpace``."""


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
        labels: VersionLabels | None = None,
    ) -> None:
        """
        Args:
            recipe: the recipe that the converter follows, as stored in versions.
            labels: the log's labels, for messages.
        """
        self._labels = labels or VersionLabels(log)
        self._config, self._log, self._model, self._plan = config, log, model, plan
        self._converter, self._recipe = converter, recipe
        self._executor = ThreadPoolExecutor(io_threads(), thread_name_prefix="quantize")
        self._gpu_executor = ThreadPoolExecutor(GPU_THREADS, thread_name_prefix="quantize-gpu")
        self._space = StagingSpace()
        self.memory: LogMemory | None = None
        """Memory of a log in memory; None: the log is on a disk."""
        self._trainer_memory = TrainerMemory(self._registered, self._gpu_executor)
        self._tables = AnnouncedTables()
        self._staged: dict[int, UploadSession] = {}
        self._committed: dict[int, UploadRecord] = {}
        self._dropped: dict[int, str] = {}
        self._started_at = time.monotonic()

    def open(self) -> None:
        """Find out if the log is in memory, and use it as such. Call it before anything is staged.

        Raises OSError.
        """
        self.memory = LogMemory.of(self._log.root, self._registered)
        if self.memory is not None:
            kept = uploads_folder(self._log.root) / _KEPT_FILE
            self._space = StagingSpace(kept, pin if self._converter.uses_gpu else None)

    def prepare_memory(self, is_stopped: Callable[[], bool]) -> None:
        """Allocate and register memory for the next versions, and compile kernels, before a trainer waits for them.

        Does nothing for a log on a disk. Thread-safe. Raises OSError.
        """
        if self.memory is None:
            return
        versions = max(2, self._config.keep_versions) + 1 - len(self._log.versions())
        sizes = [file.nbytes for file in self._layout.files]
        self.memory.spare.make(versions * sizes, is_stopped)
        self.memory.mapped.add(self.memory.spare.paths(), is_stopped)
        if self._converter.uses_gpu:
            from rollout_service.ingest.sources import gpu_changes  # needs triton

            _ = self._plans
            gpu_changes.prepare(GPU)

    @property
    def _registered(self) -> Registered | None:
        """Return a function that registers memory with the GPU that quantizes; None: the CPU quantizes."""
        return pin_if_possible if self._converter.uses_gpu else None

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

    def _note_dropped(self, version: int, why: str) -> None:
        logger.warning("staged version %d is dropped: %s", version, why)
        self._dropped = {**dict(list(self._dropped.items())[1 - _MOST_DROPPED :]), version: why}

    async def committed(self, version: int) -> UploadRecord | None:
        """Return the record of a committed version; None if it is not in the log, or the log has no record of it."""
        if version not in self._log.versions():
            return None
        if version not in self._committed:
            record = await asyncio.to_thread(read_record, self._log.folder(version))
            if record is None:
                return None
            self._committed = {version: record, **dict(list(self._committed.items())[:3])}
        return self._committed[version]

    async def begin(self, announced: Announcement, objects: WeightSource | None = None) -> UploadPlan:
        """Start or resume an upload. If the same version is staged or committed, return its plan.

        The version ``next`` is given a number: see ``protocol/upload.py``.

        ``objects``: the objects in Ray's store whose digest ``begin`` has.

        Raises VersionConflict, TableUnknown, InvalidRequest, InvalidManifest, InsufficientStorage, Forbidden or
        NotFound.
        """
        begin = await self._numbered(self._tables.in_full(announced))
        if isinstance(begin.source, SharedMemorySource):
            # before anything is dropped, so that a refused call has no effect
            await asyncio.to_thread(self._trainer_memory.open, begin.source)
        await self._drop_unshared(begin)
        if objects is not None:
            plan = await self._begin(begin, lambda: self.stage(begin, objects))
        else:
            plan = await self._begin(begin, lambda: self._stage_announced(begin))
        replaces = announced.version == NEXT and plan.state == "staged"
        return plan.model_copy(update={"replaces": replaces, "table": self._tables.name_for(begin)})

    async def _drop_unshared(self, begin: BeginUpload) -> None:
        """Drop a version that was staged from a trainer's memory and can no longer continue, since that memory is not
        read any more."""
        staged = self._staged.get(begin.version)
        if staged is None or not isinstance(staged.begin.source, SharedMemorySource):
            return
        before, now = staged.begin.source, begin.source
        is_trainers_own = isinstance(now, SharedMemorySource) and now.process == before.process
        if before != now and (is_trainers_own or not self._trainer_memory.is_there(before)):
            await self.discard(begin.version)

    async def _numbered(self, announced: Announcement) -> BeginUpload:
        """Return the announcement with its number: the given one, the one that this push had before, or the next
        one."""
        if announced.version != NEXT:
            return announced.numbered(announced.version)
        for version, staged in self._staged.items():
            if announced.uploader and announced.uploader == staged.begin.uploader:
                return announced.numbered(version)
        for version, staged in self._staged.items():
            if announced.label is not None and announced.label == staged.begin.label:
                begin = announced.numbered(version)
                await self._give_way(staged, begin)
                return begin
        return announced.numbered(self._next_number())

    async def _give_way(self, staged: UploadSession, begin: BeginUpload) -> None:
        """Let another trainer, or the same one after a restart, take over an unfinished upload. Its parts are kept if
        they are of the same tensors."""
        if staged.failure is None and begin.source is None and staged.begin.describes_what(begin):
            try:
                await asyncio.to_thread(staged.rename, uploader=begin.uploader)
            except OSError as error:
                raise RolloutServiceError(f"version {begin.version} cannot be begun again: {error}") from error
        else:
            await self.discard(begin.version)

    def _next_number(self) -> int:
        """Return the first number above all committed and staged ones. Raises VersionConflict if there is none."""
        taken = [version for version, staged in self._staged.items() if staged.failure is None]
        number = max([self.newest_number, *taken]) + 1
        if number > MAX_VERSION:
            raise VersionConflict(
                f"version {MAX_VERSION} is the last that there can be: name another weights.root, which begins anew",
                {"version": number},
            )
        return number

    @property
    def newest_number(self) -> int:
        """Return the largest number of a committed version; -1: there is none."""
        head = self._log.head()
        return -1 if head is None else head.version

    def free_number(self) -> int:
        """Return the first unstaged number above the newest version, for a version that is committed at once."""
        number = self.newest_number + 1
        while number in self._staged:
            number += 1
        if number > MAX_VERSION:
            raise VersionConflict(f"version {MAX_VERSION} is the last that there can be", {"version": number})
        return number

    async def begin_folder(self, path: Path, number: int | None = None, label: str | None = None) -> int:
        """Stage a folder's contents as the next version, unless they are already staged or the newest version.

        Contents are the same if the resolved path and the names, sizes and times of its files are. The log keeps a hash
        of these, so a repeat is recognized after a restart, too. An upload from the same path whose files have changed
        since is dropped.

        ``number``: the trainer's number. It is used if it is free and above the newest version's. Otherwise, as after a
        trainer has returned to an earlier checkpoint, the version gets the next free number. ``label``: an additional
        name.

        Return the version. Raises Forbidden, NotFound, InvalidRequest, InvalidManifest, InsufficientStorage or
        VersionConflict.
        """
        folder = allowed_path(path, self._config.source_roots)
        source = await asyncio.to_thread(FolderSource, folder, self._config.source_roots, self._model.ignored)
        same = PathSource(path=folder)
        for version, staged in list(self._staged.items()):
            if staged.begin.source == same:
                if staged.failure is None and staged.record.source_stamp == source.stamp:
                    staged.touched_at = time.monotonic()
                    return version
                await self.discard(version)
        head = self._log.head()
        newest = -1 if head is None else head.version
        known = await self.committed(newest)
        if known is not None and known.begin.source == same and known.source_stamp == source.stamp:
            return newest
        taken = [version for version, staged in self._staged.items() if staged.failure is None]
        if number is None or number <= self.newest_number or number in taken:
            number = self._next_number()
        await self.stage(BeginUpload(version=number, source=same, label=label), source)
        return number

    async def _begin(self, begin: BeginUpload, stage: Callable[[], Awaitable[UploadSession]]) -> UploadPlan:
        staged = self._staged.get(begin.version)
        resumed = staged if staged is not None and staged.failure is None else None
        known = resumed.record if resumed is not None else await self.committed(begin.version)
        if known is None:
            self.require_newer(begin.version)
            staged = await stage()
            return self._plan_of(staged.record, staged)
        await asyncio.to_thread(self._require_same, known, begin, "committed" if resumed is None else "staged")
        if resumed is not None:
            resumed.touched_at = time.monotonic()
        return self._plan_of(known, resumed)

    async def begin_broadcast(self) -> UploadSession:
        """Stage the next version, for tensors that come through ``UploadSession.convert``.

        Its table is not known yet, so the caller of ``convert`` checks tensors. Raises InsufficientStorage.
        """
        begin = BeginUpload(version=self._next_number(), source=BroadcastSource(transfer=uuid.uuid4().hex))
        return await self.stage(begin, None)

    async def renumber(self, staged: UploadSession, version: int) -> None:
        """Change a staged version's number. Raises VersionConflict if the new one is staged or committed, NotFound."""
        before = staged.begin.version
        if self._staged.get(before) is not staged:
            self.staged(before)  # raises NotFound with the reason
            raise NotFound(f"version {before} is staged by somebody else now", {"version": before})
        if version == before:
            return
        self.require_newer(version)
        if version in self._staged:
            raise VersionConflict(
                f"version {version} is being uploaded by somebody else: DELETE it, or name another",
                {"version": version, "staged": sorted(self._staged)},
            )
        try:
            await asyncio.to_thread(staged.renumber, version, self._log.staging(version))
        except OSError as error:
            raise RolloutServiceError(f"version {before} cannot be made version {version}: {error}") from error
        self._staged[version] = self._staged.pop(before)

    async def label(self, staged: UploadSession, label: str) -> None:
        """Set the label of a staged version. Raises RolloutServiceError if the disk fails."""
        try:
            await asyncio.to_thread(staged.rename, label=label)
        except OSError as error:
            raise RolloutServiceError(f"version {staged.begin.version} cannot be labelled: {error}") from error

    async def stage(self, begin: BeginUpload, source: WeightSource | None) -> UploadSession:
        """Lay out a version that expects parts, or convert the tensors of ``source``. Replaces a failed upload.

        Raises InvalidManifest, InsufficientStorage, RolloutServiceError.
        """
        failed = self._staged.pop(begin.version, None)
        if failed is not None:
            await failed.discard()
        try:
            self._staged[begin.version] = await asyncio.to_thread(self._stage, begin, source)
        except OSError as error:
            raise RolloutServiceError(
                f"version {begin.version} cannot be staged in {uploads_folder(self._log.root)}: {error}"
            ) from error
        self._dropped.pop(begin.version, None)
        return self._staged[begin.version]

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
            why = f"version {version} is committed, and versions only grow: push it again as version {NEXT!r}"
            self._note_dropped(older, why)
            await self._staged.pop(older).discard()

    async def recover(self) -> None:
        """Resume what an earlier ingest had staged; remove what can no longer be committed."""
        staging = uploads_folder(self._log.root)
        folders = sorted(staging.iterdir()) if staging.is_dir() else []
        for parts in (path for path in folders if path.name.endswith(".parts")):
            await self._recover(parts)
        # layouts are rebuilt from the parts; all other files are left over
        kept = {path.name for v in self._staged for path in (self._log.staging(v), parts_folder(self._log.staging(v)))}
        for path in folders:
            if path.name not in kept and not (path.name.endswith(".parts") and path.is_dir()):
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
        memory = self._trainer_memory.opened(source)
        if memory is None:
            memory = await asyncio.to_thread(self._opened, source)
        plans = self._plans if isinstance(memory, GpuMemory) else None
        await staged.convert_shared(batch.batch, SharedBatch(staged.begin.announced_tensors, batch, memory), plans)

    def _opened(self, source: SharedMemorySource) -> MappedMemory:
        memory = self._trainer_memory.open(source)
        if isinstance(memory, GpuMemory):
            _ = self._plans  # import in this thread: it takes a second
        return memory

    async def expire(self) -> None:
        """Drop uploads without activity for too long, and release the memory of trainers that have ended."""
        sources = [staged.begin.source for staged in self._staged.values()]
        used = {source.memory for source in sources if isinstance(source, SharedMemorySource)}
        await asyncio.to_thread(self._trainer_memory.prune, used)
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
                    f"(weights.staged_ttl_s={self._config.staged_ttl_s:g}); it lacked {len(staged.missing)} of "
                    f"{staged.num_parts} parts",
                )

    async def close(self) -> None:
        """Stop converting and close every file; staged versions stay on disk for the next ingest."""
        for staged in self._staged.values():
            await staged.close()
        self._space.close()
        self._executor.shutdown()
        self._gpu_executor.shutdown()
        if self.memory is not None:
            self.memory.mapped.close()
        self._trainer_memory.close()

    def require_newer(self, version: int) -> None:
        """Raise VersionConflict for a version that is not newer than the newest committed one."""
        head = self._log.head()
        if head is not None and version <= head.version:
            kept = self._log.versions()
            raise VersionConflict(
                f"version {version} is not newer than the newest committed version {head.version} "
                f"(digest {head.digest}), and versions only grow. A trainer that has gone back pushes the version "
                f"{NEXT!r}, with a label of its own such as 'run/step-{version}'; client.rollback(to=…), POST "
                "/v1/weights/rollback or `rollout-service log rollback` make a kept version the newest again, of "
                f"{self._labels.spelled(kept)}",
                {
                    "version": version,
                    "latest_version": head.version,
                    "latest_digest": head.digest,
                    "kept_versions": kept,
                },
            )

    async def _stage_announced(self, begin: BeginUpload) -> UploadSession:
        return await self.stage(begin, await asyncio.to_thread(self._source_of, begin))

    def _source_of(self, begin: BeginUpload) -> WeightSource | None:
        """Return a reader of the announced source; None: the tensors come in parts."""
        if isinstance(begin.source, ObjectSource):
            raise InvalidRequest(
                "objects in Ray's store are named by references, which only the ingest's Python handle takes: push "
                "them with rollout_service.client.ray_refs, or give a path or tensors"
            )
        if isinstance(begin.source, BroadcastSource):
            raise InvalidRequest(
                "what a trainer broadcasts cannot be read again, and is begun by POST /start_weight_update: give a "
                "path or tensors"
            )
        if begin.source is None or isinstance(begin.source, SharedMemorySource):
            return None
        return FolderSource(self._folder_of(begin.source), self._config.source_roots, self._model.ignored)

    def _folder_of(self, source: PathSource) -> Path:
        return allowed_path(source.path, self._config.source_roots)

    def _stage(self, begin: BeginUpload, source: WeightSource | None) -> UploadSession:
        table = begin.announced_tensors if source is None else source.table
        if source is not None:
            self._model.check_table(table, self._plan)
        elif not isinstance(begin.source, BroadcastSource) and not self._tables.are_kept(table):
            self._model.check_table(table, self._plan)
            if left_out := self._model.ignored.summary(tensor.name for tensor in table):
                logger.info("version %d: %s", begin.version, left_out)
            self._tables.keep(table)
        delta = None if begin.delta is None else self._delta_of(begin)
        try:
            return UploadSession(begin, self._log.staging(begin.version), self._resources, source, delta)
        except BaseException:
            if delta is not None:
                delta.close()
            raise

    @cached_property
    def _plans(self) -> "BatchPlans":
        from rollout_service.ingest.batch_plan import BatchPlans  # needs triton, and a second to be imported

        return BatchPlans(self._converter, self._layout.places)

    @cached_property
    def _resources(self) -> Resources:
        reads_on_gpu = self.memory is not None and self._converter.uses_gpu
        return Resources(
            self._model,
            self._converter,
            self._layout,
            self._config.part_bytes,
            self._executor,
            self._space,
            self.memory,
            self._gpu_executor,
            self._plans if reads_on_gpu else None,
        )

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self._converter.slots(self._model.stored))

    def _delta_of(self, begin: BeginUpload) -> DeltaOfVersion:
        mapped = None if self.memory is None else self.memory.mapped
        return DeltaOfVersion(self._log, begin, self._recipe, self._converter, mapped)

    async def _recover(self, parts: Path) -> None:
        number = parts.name.removesuffix(".parts")
        try:
            record = await asyncio.to_thread(read_record, parts)
            if record is None:
                raise LogCorrupt(f"{parts} holds no record")
            version = record.begin.version
            self.require_newer(version)
            if isinstance(record.begin.source, SharedMemorySource):
                raise InvalidRequest("what a trainer has shared cannot be read again: push it anew")
            staged = await self._stage_announced(record.begin)
        except (RolloutServiceError, OSError) as error:  # an unreadable upload must not keep the ingest from starting
            if isinstance(error, InsufficientStorage):
                logger.error("%s stays on disk until its upload is begun again: %s", parts, error)
                return
            if number.isdecimal():
                self._note_dropped(int(number), f"{parts} cannot be taken up again: {error}")
            await asyncio.to_thread(remove_tree, parts)
        else:
            logger.info(
                "version %d is staged still, and lacks %d of %d parts", version, len(staged.missing), staged.num_parts
            )

    def _require_same(self, known: UploadRecord, begin: BeginUpload, state: str) -> None:
        """Raise VersionConflict if ``begin`` differs from the staged or committed announcement."""
        if begin.label is not None and begin.label != known.begin.label:
            raise VersionConflict(
                f"version {begin.version} is {state} with {_spelled(known.begin.label)}, and {_spelled(begin.label)} "
                f"now: leave the label out, or push version {NEXT!r}",
                {"version": begin.version, "labels": [known.begin.label, begin.label]},
            )
        mine, theirs = _announced_digest(known.begin), _announced_digest(begin)
        if known.begin.describes_what(begin) and isinstance(begin.source, PathSource):
            mine, theirs = known.source_stamp, source_stamp(self._folder_of(begin.source))
        if mine == theirs:
            return
        newer = f"push a newer version, such as {NEXT!r}, or go back to a kept one by POST /v1/weights/rollback"
        instead = newer if state == "committed" else "DELETE it to begin anew"
        head = self._log.head()
        raise VersionConflict(
            f"version {begin.version} is {state} with {_difference(known.begin, begin)} ({mine}, and {theirs} now): "
            f"{instead}",
            {
                "version": begin.version,
                "digests": [mine, theirs],
                "latest_version": head and head.version,
                "latest_digest": head and head.digest,
            },
        )

    def _plan_of(self, record: UploadRecord, staged: UploadSession | None = None) -> UploadPlan:
        """Return the reply to ``begin``; ``staged``: None if it is committed."""
        return UploadPlan(
            version=record.begin.version,
            state="committed" if staged is None else "staged",
            part_bytes=record.part_bytes,
            num_parts=record.num_parts,
            missing_parts=() if staged is None else tuple(sorted(staged.missing)),
            digests=dict(enumerate(record.part_digests)) if staged is None else dict(staged.digests),
        )


def _announced_digest(begin: BeginUpload) -> str:
    if isinstance(begin.source, ObjectSource):
        return with_kv_scales(begin.source.digest, begin.kv_scales)
    text = begin.model_dump_json(include={"tensors", "source", "delta"})
    return with_kv_scales(xxhash.xxh3_128_hexdigest(text.encode()), begin.kv_scales)


def _spelled(label: str | None) -> str:
    return "no label" if label is None else f"the label {label!r}"


def _difference(known: BeginUpload, begin: BeginUpload) -> str:
    """Describe the difference between two announcements of one version, or between two readings of the same path."""
    if known.describes_what(begin):
        return "another content under that path"
    if known.describes_what(begin.model_copy(update={"kv_scales": known.kv_scales})):
        return "other KV scales"
    if begin.source is None and known.tensors == begin.tensors:
        return "a delta of another base" if known.delta and begin.delta else "tensors where one has a delta"
    return "another content" if isinstance(begin.source, ObjectSource) else "another tensor table"
