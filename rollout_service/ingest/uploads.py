"""The versions that are staged: begun or resumed, found again after a restart, dropped when nobody comes back."""

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
from rollout_service.ingest.upload_session import UploadSession, parts_folder
from rollout_service.model.convert import Converter
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.pinning import pin, pin_if_possible
from rollout_service.protocol import delta_planes
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
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.labels import VersionLabels
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Recipe
from rollout_service.store.mapped_files import Registered
from rollout_service.store.part_space import DirectSpace, MappedSpace, PartSpace
from rollout_service.store.served_numbers import ServedNumbers
from rollout_service.store.unquantized import UnquantizedLog
from rollout_service.store.upload_record import UploadRecord, read_record, source_stamp
from rollout_service.store.writer import LogMemory
from rollout_service.threads import io_threads

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

logger = logging.getLogger(__name__)
_GRACE = 0.25
"""Share of ``weights.staged_ttl_s`` for which nothing expires after the ingest has started."""
_MOST_DROPPED = 100
"""Versions of which it is remembered why they were dropped."""
_KEPT_PARTS = "kept-parts"
"""Beside the folders of what is staged: see ``MappedSpace``."""


class Uploads:
    """All staged versions of one log. Whoever calls its coroutines lets one finish before the next."""

    def __init__(
        self,
        config: WeightsConfig,
        log: WeightLog,
        model: ServedModel,
        plan: QuantPlan,
        converter: Converter,
        recipe: Recipe,
        unquantized: UnquantizedLog | None = None,
        labels: VersionLabels | None = None,
        served: ServedNumbers | None = None,
    ) -> None:
        """
        Args:
            recipe: that the converter follows, as versions have it.
            unquantized: None if no shadow will ask for versions as they came.
            labels: of the log, for messages.
            served: numbers that mean versions which are lost, and are given to no other.
        """
        self._unquantized, self._labels = unquantized, labels or VersionLabels(log)
        self._config, self._log, self._model, self._plan = config, log, model, plan
        self._converter, self._recipe = converter, recipe
        self._served = served or ServedNumbers(log)
        self._executor = ThreadPoolExecutor(io_threads(), thread_name_prefix="quantize")
        self._gpu_executor = ThreadPoolExecutor(GPU_THREADS, thread_name_prefix="quantize-gpu")
        self._space: PartSpace = DirectSpace.for_parts_of(config.part_bytes)
        self.memory: LogMemory | None = None
        """Of a log in memory; None: the log is on a disk."""
        self._trainer_memory = TrainerMemory(self._registered, self._gpu_executor)
        self._tables = AnnouncedTables()
        self._staged: dict[int, UploadSession] = {}
        self._committed: dict[int, UploadRecord] = {}
        self._dropped: dict[int, str] = {}
        self._started_at = time.monotonic()

    def open(self) -> None:
        """Find out whether the log is in memory, which is then used as such. Before anything is staged.

        Raises OSError.
        """
        self.memory = LogMemory.of(self._log.root, self._registered)
        if self.memory is not None:
            kept = uploads_folder(self._log.root) / _KEPT_PARTS
            self._space = MappedSpace(kept, pin if self._converter.uses_gpu else None)

    def prepare_memory(self, is_stopped: Callable[[], bool]) -> None:
        """Take and register the memory of the next versions, and compile kernels, before a trainer waits for it.

        Does nothing for a log on a disk. Any thread may call it. Raises OSError.
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
            delta_planes.prepare_decoding()

    @property
    def _registered(self) -> Registered | None:
        """Makes memory known to the GPU that quantizes; None: the CPU does."""
        return pin_if_possible if self._converter.uses_gpu else None

    @property
    def staged_versions(self) -> list[int]:
        """Those that are staged, in no order."""
        return list(self._staged)

    @property
    def needed(self) -> set[int]:
        """Versions in the log that staged ones are deltas of."""
        return {staged.needs for staged in self._staged.values() if staged.needs is not None}

    def staged(self, version: int) -> UploadSession:
        """The upload of ``version``. Raises NotFound, with the reason if the service has dropped it."""
        if version not in self._staged:
            why = self._dropped.get(version)
            dropped = "" if why is None else f"; what was staged of it was dropped: {why}"
            raise NotFound(
                f"version {version} is not staged (staged: {sorted(self._staged)}){dropped}: POST /v1/weights first",
                {"version": version, "staged": sorted(self._staged)},
            )
        return self._staged[version]

    def why_dropped(self, version: int) -> str | None:
        """Why a version that was staged is not any more; None: nobody but its trainer has dropped it."""
        return self._dropped.get(version)

    def _note_dropped(self, version: int, why: str) -> None:
        logger.warning("staged version %d is dropped: %s", version, why)
        self._dropped = {**dict(list(self._dropped.items())[1 - _MOST_DROPPED :]), version: why}

    async def committed(self, version: int) -> UploadRecord | None:
        """How a committed version came; None for one that is not in the log, or of a log that kept no records."""
        if version not in self._log.versions():
            return None
        if version not in self._committed:
            record = await asyncio.to_thread(read_record, self._log.folder(version))
            if record is None:
                return None
            self._committed = {version: record, **dict(list(self._committed.items())[:3])}
        return self._committed[version]

    async def begin(self, announced: Announcement, objects: WeightSource | None = None) -> UploadPlan:
        """Start or resume an upload; the plan of a staged or committed one if it is the same.

        The version ``next`` is given a number: see ``protocol/upload.py``.

        ``objects``: what a trainer has put into Ray's object store, of which ``begin`` has the digest.

        Raises VersionConflict, TableUnknown, InvalidRequest, InvalidManifest, InsufficientStorage, Forbidden or
        NotFound.
        """
        begin = await self._numbered(self._tables.in_full(announced))
        if isinstance(begin.source, SharedMemorySource):
            await asyncio.to_thread(self._trainer_memory.open, begin.source)  # refused before anything is dropped
        await self._drop_unshared(begin)
        if objects is not None:
            plan = await self._begin(begin, lambda: self.stage(begin, objects))
        else:
            plan = await self._begin(begin, lambda: self._stage_announced(begin))
        replaces = announced.version == NEXT and plan.state == "staged"
        return plan.model_copy(update={"replaces": replaces, "table": self._tables.name_for(begin)})

    async def _drop_unshared(self, begin: BeginUpload) -> None:
        """Drop what was staged from a trainer's memory that is not read any more: nobody can go on with it."""
        staged = self._staged.get(begin.version)
        if staged is None or not isinstance(staged.begin.source, SharedMemorySource):
            return
        before, now = staged.begin.source, begin.source
        is_trainers_own = isinstance(now, SharedMemorySource) and now.process == before.process
        if before != now and (is_trainers_own or not self._trainer_memory.is_there(before)):
            await self.discard(begin.version)

    async def _numbered(self, announced: Announcement) -> BeginUpload:
        """With the number that it names, or that this push was given before, or the next one."""
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
        """An upload that was not finished is begun by another trainer, or by the same one after a restart: it goes on
        with the parts that are there, if they are of the same tensors."""
        if staged.failure is None and begin.source is None and staged.begin.describes_what(begin):
            try:
                await asyncio.to_thread(staged.taken_over, begin.uploader)
            except OSError as error:
                raise RolloutServiceError(f"version {begin.version} cannot be begun again: {error}") from error
        else:
            await self.discard(begin.version)

    def _next_number(self) -> int:
        """The first above all that are committed or staged, or were served. Raises VersionConflict if there is none."""
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
        """The largest that a committed version has, or one had that is lost; -1: none has."""
        head = self._log.head()
        return max(-1 if head is None else head.version, self._served.newest)

    def free_number(self) -> int:
        """The first above the newest version that nobody stages: for a version that is committed at once."""
        number = self.newest_number + 1
        while number in self._staged:
            number += 1
        if number > MAX_VERSION:
            raise VersionConflict(f"version {MAX_VERSION} is the last that there can be", {"version": number})
        return number

    async def begin_folder(self, path: Path, number: int | None = None, label: str | None = None) -> int:
        """Stage what lies in a folder as the next version, unless that is staged or is the newest version already.

        Whether it is, its path says, with links followed, and names, sizes and times of its files, of which the log
        keeps a hash: a repeat is known after a restart, too. What an upload from the same path had begun to read from
        files that have changed since is dropped.

        ``number``: what the trainer calls it. It is taken if it is newer than the newest version and free; a number
        that is not, as after a trainer has gone back to an earlier checkpoint, says nothing of what is in the folder,
        and the version then has the next number after all that are committed or staged. ``label``: another name of it.

        Returns the version. Raises Forbidden, NotFound, InvalidRequest, InvalidManifest, InsufficientStorage or
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
        """Lay out the next version, for tensors that come through ``UploadSession.convert``.

        Its table is not known yet: whoever converts tensors checks it. Raises InsufficientStorage.
        """
        begin = BeginUpload(version=self._next_number(), source=BroadcastSource(transfer=uuid.uuid4().hex))
        return await self.stage(begin, None)

    async def renumber(self, staged: UploadSession, version: int) -> None:
        """Make a staged version another one. Raises VersionConflict if that is staged or committed, NotFound."""
        before = staged.begin.version
        if self._staged.get(before) is not staged:
            self.staged(before)  # it says why
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
        """Give a staged version its trainer's name. Raises RolloutServiceError if the disk does not take it."""
        try:
            await asyncio.to_thread(staged.labelled, label)
        except OSError as error:
            raise RolloutServiceError(f"version {staged.begin.version} cannot be labelled: {error}") from error

    async def stage(self, begin: BeginUpload, source: WeightSource | None) -> UploadSession:
        """Lay a version out and expect its parts, or convert the tensors of ``source``, in place of what failed.

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
        """Discard this very upload, if it is staged still."""
        if self._staged.get(staged.begin.version) is staged:
            await self.discard(staged.begin.version)

    async def committed_now(self, version: int, digest: str) -> None:
        """A staged version has been committed under that digest: remove what is left of its upload, and what it has
        overtaken."""
        staged = self._staged.pop(version)
        await asyncio.to_thread(staged.committed, digest)
        await self.overtaken_by(version)

    async def overtaken_by(self, version: int) -> None:
        """A version has been committed: drop what is staged under a lower number."""
        for older in [v for v in self._staged if v < version]:
            why = f"version {version} is committed, and versions only grow: push it again as version {NEXT!r}"
            self._note_dropped(older, why)
            await self._staged.pop(older).discard()

    async def recover(self) -> None:
        """Take up what an earlier ingest had staged; what can be committed no more is removed."""
        if self._unquantized is not None:
            await asyncio.to_thread(self._unquantized.recover, self._log)
        staging = uploads_folder(self._log.root)
        folders = sorted(staging.iterdir()) if staging.is_dir() else []
        for parts in (path for path in folders if path.name.endswith(".parts")):
            await self._recover(parts)
        # the layouts are made again from the parts; anything else is nobody's
        kept = {path.name for v in self._staged for path in (self._log.staging(v), parts_folder(self._log.staging(v)))}
        for path in folders:
            if path.name not in kept and not (path.name.endswith(".parts") and path.is_dir()):
                await asyncio.to_thread(remove_tree, path)

    async def take_shared(self, version: int, batch: SharedTensors) -> None:
        """Convert tensors that lie in a trainer's memory now. Raises NotFound, VersionConflict, InvalidRequest, or what
        the first failed conversion raised.
        """
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
            _ = self._plans  # what they import takes a second
        return memory

    async def expire(self) -> None:
        """Drop what nobody has touched for too long, and let go of the memory of trainers that have ended."""
        sources = [staged.begin.source for staged in self._staged.values()]
        used = {source.memory for source in sources if isinstance(source, SharedMemorySource)}
        await asyncio.to_thread(self._trainer_memory.prune, used)
        for version, staged in list(self._staged.items()):
            now = time.monotonic()
            # what an earlier ingest took in is as old as its files are by the wall clock, which may have been set since
            # then: whoever still sends it has some time to come back
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
        """Stop converting and close every file; what is staged stays on disk for the next ingest."""
        for staged in self._staged.values():
            await staged.leave()
        self._executor.shutdown()
        self._gpu_executor.shutdown()
        if self.memory is not None:
            self.memory.mapped.close()
        self._trainer_memory.close()

    def require_newer(self, version: int) -> None:
        """Raises VersionConflict for a version that is not newer than the newest committed one."""
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
        """What reads the source that is announced; None: the tensors come in parts."""
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
            return UploadSession(
                begin,
                self._log.staging(begin.version),
                self._model,
                self._converter,
                self._layout,
                self._config.part_bytes,
                self._executor,
                source,
                self._space,
                None if self._unquantized is None else self._unquantized.begin(begin.version, table),
                self.memory,
                delta,
                self._gpu_executor,
            )
        except BaseException:
            if delta is not None:
                delta.close()
            raise

    @cached_property
    def _plans(self) -> "BatchPlans":
        from rollout_service.ingest.batch_plan import BatchPlans  # needs triton, and a second to be imported

        return BatchPlans(self._converter, self._layout.places)

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
        except (RolloutServiceError, OSError) as error:  # one that cannot be read is no reason not to start
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
        """Raises VersionConflict if ``begin`` announces something else than is staged or committed."""
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
        """The reply to ``begin``; ``staged``: None if it is committed."""
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
    """In what two announcements of one version differ, or two readings of the same path."""
    if known.describes_what(begin):
        return "another content under that path"
    if known.describes_what(begin.model_copy(update={"kv_scales": known.kv_scales})):
        return "other KV scales"
    if begin.source is None and known.tensors == begin.tensors:
        return "a delta of another base" if known.delta and begin.delta else "tensors where one has a delta"
    return "another content" if isinstance(begin.source, ObjectSource) else "another tensor table"
