"""The upload of one version, from ``begin`` to ``commit``.

tensors come from        parts that a trainer sends (sources/parts.py); a source that has all of them
                         (sources/source.py), such as a folder or Ray objects; a broadcast or shared memory, a few
                         at a time (sources/shared_memory.py); or an older version in the log, with changes that come
                         in parts (sources/delta.py)
each is converted        in the background as soon as it is complete (conversion.py)
states of a session      receiving → closing → committed; or failed; or left: discarded, or resumed by the next
                         process, which finds the parts and the record on disk
"""

import asyncio
import errno
import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.errors import (
    InvalidDelta,
    LogCorrupt,
    NotFound,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.ingest.conversion import Conversion, Read, TiedHead
from rollout_service.ingest.sources.changes import ReceivedChanges
from rollout_service.ingest.sources.delta import DeltaOfVersion
from rollout_service.ingest.sources.parts import PartFiles, ReceivedParts
from rollout_service.ingest.sources.shared_memory import SharedBatch
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.model.convert import BATCH_BYTES, Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.base import Failure
from rollout_service.protocol.upload import (
    BeginUpload,
    BroadcastSource,
    SharedMemorySource,
)
from rollout_service.protocol.weights import UploadTimings, WeightStatus
from rollout_service.runtime.threads import io_threads
from rollout_service.store.durable_io import DISK_FULL, no_room, remove_tree
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.part_space import DiskSpace, PartSpace
from rollout_service.store.upload_record import UploadRecord, read_record, write_record
from rollout_service.store.writer import LogMemory, VersionWriter

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

logger = logging.getLogger(__name__)


class Phase(Enum):
    """The state of a session. A failed conversion is not a phase, since it may be repaired: see ``failure``."""

    RECEIVING = "parts may come, and of two uploaders' the one that began may replace the other's"
    CLOSING = "a commit has begun: what is there is what is committed"
    LEFT = "nothing comes in or is converted any more"


class UploadSession:
    """Converts tensors in ``executor`` as soon as they are complete, so that upload and quantization overlap.

    Lives in the ingest's event loop; only the conversions run in threads. ``folder`` becomes the version's folder.
    Until then, ``folder.parts`` holds the trainer's bytes. It survives a restart: if the same upload is begun again,
    its parts are still there.
    """

    def __init__(
        self,
        begin: BeginUpload,
        folder: Path,
        model: ServedModel,
        converter: Converter,
        layout: Layout,
        part_bytes: int,
        executor: Executor,
        source: WeightSource | None = None,
        space: PartSpace | None = None,
        memory: LogMemory | None = None,
        delta: DeltaOfVersion | None = None,
        gpu_executor: Executor | None = None,
    ) -> None:
        """
        Args:
            layout: the layout of every version of the model.
            source: has all tensors; None: they come in parts, or through ``convert``.
            space: storage for received parts; None: only files.
            memory: memory of a log in memory.
            delta: produces the tensors from the parts, and is closed when the session ends; None: the parts hold the
                tensors.
            gpu_executor: its few threads convert tensors that a GPU reads from parts; None: ``executor`` does.

        Raises InsufficientStorage if the disk is full, OSError for an earlier process's part that can neither be read
        nor removed, or InvalidDelta for a part of another delta. All files are closed then.
        """
        self._folders, self._memory = (folder, parts_folder(folder)), memory
        stamp = "" if source is None else source.stamp
        if isinstance(begin.source, SharedMemorySource):
            stamp = begin.source.transfer
        record = UploadRecord(begin=begin, part_bytes=part_bytes, source_stamp=stamp)
        self.record = self._left_behind(record) or record
        self.begin, self.part_bytes = self.record.begin, self.record.part_bytes
        self._tied = TiedHead(model.head, model.embedding) if model.tied and model.head in model.stored else None
        self._may_miss_tensors = isinstance(begin.source, BroadcastSource)
        self._to_come: set[str] = set()
        self._batches: dict[int, asyncio.Task[None]] = {}
        if isinstance(begin.source, SharedMemorySource):
            self._to_come = {tensor.name for tensor in begin.announced_tensors}
        self.space = space or DiskSpace(0)
        """Storage for received parts."""
        writer = self._laid_out(layout)
        self._conversion = Conversion(begin.version, writer, (delta or converter).convert, executor)
        self._delta = delta
        reads_on_gpu = delta is None and self._conversion.gpu is not None
        self._gpu_executor = gpu_executor if reads_on_gpu else None
        self._parts, self._read = self._reading(writer)
        self.touched_at = time.monotonic()
        """Time of the last arrival on this process's monotonic clock: the wall clock may be set."""
        self.in_log = False
        """True once the version is committed."""
        self._begun_at = self._received_at = self._stored_at = time.monotonic()
        self._phase = Phase.RECEIVING
        if source is None:
            self._expect_parts()
        else:
            for names in spread(list(source.batches(BATCH_BYTES)), io_threads()):
                self._conversion.begin(names, source.read)

    def _reading(self, writer: VersionWriter) -> tuple[ReceivedParts | ReceivedChanges, Read]:
        """Return the received parts, and a function that reads tensors from them."""
        gpu = self._conversion.gpu
        if self._delta is not None:
            changes = ReceivedChanges(self._folders[1], self.begin)
            return changes, self._delta.reading(changes.read, writer.room if writer.has_rooms else None, gpu)
        parts = ReceivedParts(self._folders[1], self.begin.tensors, self.part_bytes)
        return parts, parts.files.reading(
            lambda tensor: writer.room_as_stored(tensor.name, tensor.dtype, tensor.shape), gpu
        )

    def _left_behind(self, record: UploadRecord) -> UploadRecord | None:
        """Return the record of the same upload, if an earlier ingest left one; remove all other files."""
        folder, parts = self._folders
        remove_tree(folder)  # it is rebuilt from the parts
        folder.mkdir(parents=True, exist_ok=True)  # on NFS, files that some process has open stay in the folder
        try:
            known = read_record(parts)
        except (LogCorrupt, OSError) as error:
            logger.warning("what was staged of version %d is dropped: %s", record.begin.version, error)
            known = None
        if known is None or not known.begin.describes_what(record.begin) or known.source_stamp != record.source_stamp:
            remove_tree(parts)
            parts.mkdir(parents=True, exist_ok=True)
            return None
        return known

    def _laid_out(self, layout: Layout) -> VersionWriter:
        folder, parts = self._folders
        written = sum(path.lstat().st_size for path in parts.glob("part-*"))
        # a delta's size is unknown yet: a part that does not fit is refused later
        part_bytes = self.begin.nbytes - written if self.begin.delta is None else 0
        stored_bytes = layout.nbytes
        try:
            self.space.make_room(folder, stored_bytes + part_bytes)
            writer = VersionWriter(folder, layout, self._memory)
            try:
                if shutil.disk_usage(parts).free + self.space.kept_bytes < part_bytes:
                    raise OSError(errno.ENOSPC, "no room for the parts")
                write_record(parts, self.record)
            except OSError:
                writer.close()
                raise
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            self._unmap_removed()
            if not written:
                shutil.rmtree(parts, ignore_errors=True)
            what = f"version {self.begin.version} ({stored_bytes} bytes as stored, {part_bytes} of parts to come)"
            if error.errno in DISK_FULL:
                raise no_room(what, folder.parent, stored_bytes + part_bytes) from error
            raise RolloutServiceError(f"{what} cannot be laid out in {folder}: {error}") from error
        return writer

    def _expect_parts(self) -> None:
        """Convert each tensor once its last part is there, together with the other tensors that this part completes."""
        if self._parts.empty:
            self._convert(self._parts.empty)
        try:
            found = [self._folders[1].stat().st_mtime]
            for number, digest, path in self._parts.left_behind():
                found.append(path.stat().st_mtime)
                self.accept(number, digest, path)
        except (OSError, InvalidDelta):
            self._phase = Phase.LEFT
            self._conversion.stop_and_wait()
            remove_tree(self._folders[0])
            self._unmap_removed()
            raise
        if self._parts.digests:  # only the files tell when an earlier ingest received them
            self.touched_at = time.monotonic() - max(0.0, time.time() - max(found))

    @property
    def needs(self) -> int | None:
        """Return the version in the log from which this one is made; None: there is none."""
        return None if self._delta is None else self._delta.base

    @property
    def transport(self) -> str:
        """Return the name of the transport, for metrics."""
        return self.begin.transport

    @property
    def received_bytes(self) -> int:
        """Return the received bytes: of parts, or of the tensors of another source."""
        return self._parts.nbytes if self.begin.source is None else self._conversion.read_bytes

    @property
    def timings(self) -> UploadTimings:
        """Return the timings of a finished upload."""
        return UploadTimings(
            receive_s=self._received_at - self._begun_at,
            quantize_s=self._conversion.quantize_s,
            store_s=self._conversion.store_s,
            finish_s=self._stored_at - self._received_at,
        )

    @property
    def num_parts(self) -> int:
        """Return the number of parts of the whole upload."""
        return self.record.num_parts

    @property
    def missing(self) -> set[int]:
        """Return the numbers of the parts that have not arrived."""
        return self._parts.missing

    @property
    def digests(self) -> dict[int, str]:
        """Return the digests of the received parts."""
        return self._parts.digests

    @property
    def failure(self) -> RolloutServiceError | None:
        """Return the known error because of which this version cannot be committed; see ``Conversion.failure``."""
        return self._conversion.failure

    def complete_record(self) -> UploadRecord:
        """Return the record of the upload, once every part is there."""
        digests = self.digests
        return self.record.model_copy(
            update={
                "part_digests": tuple(digests[part] for part in range(self.num_parts)),
                "delta_bytes": None if self._delta is None else self._parts.nbytes,
            }
        )

    def incoming_path(self, part: int) -> Path:
        """Return a new file in which one sender may store a part until it is complete."""
        return self._folders[1] / f"part-{part:06d}.{uuid.uuid4().hex}.incoming"

    def accept(
        self, part: int, digest: str, received: Path, uploader: str = "", data: memoryview | None = None
    ) -> None:
        """Take in a part whose size and digest were checked. Repeating a part has no effect.

        ``data``: the same bytes in memory, if they are still there.

        With two concurrent uploaders, the parts of the one that began the version win. Raises VersionConflict if other
        bytes came under the same number before, NotFound if the version was discarded meanwhile, InvalidDelta for a
        part of a delta that cannot be read.
        """
        if self._phase is Phase.LEFT:
            raise NotFound(f"version {self.begin.version} was discarded before part {part} was complete: begin anew")
        self.touched_at = time.monotonic()
        known = self.digests.get(part)
        if known == digest:
            return
        if known is not None and not self._gives_way(part, uploader):
            raise VersionConflict(
                f"part {part} of version {self.begin.version} came with digest {known} before and {digest} now: "
                "DELETE the staged version to begin anew",
                {"part": part, "digests": [known, digest]},
            )
        arrival = self._parts.add(part, digest, received, uploader, data)
        self._received_at = time.monotonic()
        files = self._parts.files if isinstance(self._parts, ReceivedParts) else None
        if self._gpu_executor is None or files is None or arrival.replaced or not files.is_registered(part):
            self._convert(arrival.whole, arrival.replaced)
        else:
            self._convert_together(files, arrival.whole, self._gpu_executor)

    def _gives_way(self, part: int, uploader: str) -> bool:
        """Return True if ``uploader`` began the upload, and the present part came from another one."""
        began = bool(uploader) and uploader == self.begin.uploader
        return began and self._parts.came_from(part) != uploader and self._phase is Phase.RECEIVING

    def convert(self, names: Sequence[str], read: Read) -> Future[None]:
        """Convert tensors of a broadcast, each once. See ``Conversion.begin``.

        Raises NotFound if the version was discarded meanwhile.
        """
        self._require_receiving()
        self.touched_at = self._received_at = time.monotonic()
        return self._conversion.begin(names, read)

    def _require_receiving(self) -> None:
        if self._phase is not Phase.RECEIVING:
            raise NotFound(f"version {self.begin.version} was dropped while its tensors came: begin anew")

    async def convert_shared(self, number: int, batch: SharedBatch, plans: "BatchPlans | None" = None) -> None:
        """Convert a batch of tensors in a trainer's memory. Return once they are no longer read.

        Repeating a batch number awaits the same conversion. ``plans``: see ``Conversion.begin_shared``.

        Raises NotFound if the version was discarded meanwhile, or the error of the first failed conversion.
        """
        if number not in self._batches:
            self._batches[number] = asyncio.create_task(self._convert_shared(batch, plans))
        await asyncio.shield(self._batches[number])
        if (failure := self.failure) is not None:
            raise failure

    async def _convert_shared(self, batch: SharedBatch, plans: "BatchPlans | None") -> None:
        groups = list(batch.groups())
        self._require_receiving()
        self.touched_at = self._received_at = time.monotonic()
        converting = [self._conversion.begin_shared(group, plans) for group in groups]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, converting))
        except asyncio.CancelledError:
            raise NotFound(f"version {self.begin.version} was dropped while its tensors came: begin anew") from None
        self._to_come.difference_update(*(group.names for group in groups))
        self._received_at = time.monotonic()

    def all_came(self) -> None:
        """Allow the commit: a broadcast has brought every tensor."""
        self._may_miss_tensors = False

    def renumber(self, version: int, folder: Path) -> None:
        """Change the version number, before the session is finished. Raises OSError, and then keeps the old number."""
        begin = self.begin.model_copy(update={"version": version})
        record = self.record.model_copy(update={"begin": begin})
        folders = folder, parts_folder(folder)
        write_record(self._folders[1], record)
        for path in folders:  # such folders are left over: Uploads knows no version there
            remove_tree(path)
        self._folders[0].rename(folders[0])
        self._folders[1].rename(folders[1])
        self.begin, self.record, self._folders = begin, record, folders
        self._conversion.renumber(version)

    def taken_over(self, uploader: str) -> None:
        """Let another push of the same tensors continue this one; ``uploader`` becomes its owner. Raises OSError."""
        self._rename({"uploader": uploader})

    def labelled(self, label: str) -> None:
        """Set the trainer's label. Raises OSError."""
        self._rename({"label": label})

    def _rename(self, changes: dict[str, object]) -> None:
        begin = self.begin.model_copy(update=changes)
        record = self.record.model_copy(update={"begin": begin})
        write_record(self._folders[1], record)
        self.begin, self.record = begin, record

    def _convert(self, names: list[str], replaced: Path | None = None) -> None:
        batches = [names] if self._delta is None else list(self._delta.batches(names, BATCH_BYTES))
        instead_of = None if replaced is None else partial(self.space.release, replaced)
        # with a GPU, a thread of a delta launches kernels and waits for them
        in_turns = self._delta is not None and self._conversion.gpu is not None
        self._conversion.begin_replaceable(
            batches if names else [], self._read, self._parts.converted, instead_of, in_turns=in_turns
        )

    def _convert_together(self, files: PartFiles, names: list[str], executor: Executor) -> None:
        """Convert small tensors that a GPU reads from parts together with those of other parts. Large ones are
        converted separately, since other threads would wait for them."""
        if small := [name for name in names if files.nbytes_of(name) <= BATCH_BYTES]:
            most = max(1, BATCH_BYTES // self.part_bytes)
            self._conversion.begin_together(small, self._read, self._parts.converted, executor, most)
        self._convert([name for name in names if files.nbytes_of(name) > BATCH_BYTES])

    async def finish(self, meant: str | None = None) -> tuple[StoredTensor, ...]:
        """Wait for the conversions and sync; may be called again.

        Raises UploadIncomplete, VersionConflict if ``meant`` is not the upload's digest, or the error of the first
        failed conversion.
        """
        if self.missing:
            raise self.failure or UploadIncomplete(
                f"version {self.begin.version} lacks {len(self.missing)} of {self.num_parts} parts",
                {"missing_parts": sorted(self.missing)[:1000]},
            )
        if self._may_miss_tensors:
            raise self.failure or UploadIncomplete(
                f"version {self.begin.version} is being broadcast: POST /finish_weight_update commits it"
            )
        if self._to_come:
            raise self.failure or UploadIncomplete(
                f"version {self.begin.version} lacks {len(self._to_come)} tensors, which its trainer has not sent: "
                f"{', '.join(sorted(self._to_come)[:4])}",
                {"missing_tensors": sorted(self._to_come)[:1000]},
            )
        self._require_meant(meant)
        if self._phase is Phase.RECEIVING:
            self._phase = Phase.CLOSING
        check = None if self._delta is None else self._delta.require_announced
        stored = await self._conversion.finish(tied=self._tied, check=check)
        self._stored_at = time.monotonic()
        return stored

    def _require_meant(self, meant: str | None) -> None:
        """Raise VersionConflict if the commit expects other parts."""
        present = self.complete_record().upload_digest
        if meant is not None and meant != present:
            raise VersionConflict(
                f"version {self.begin.version} was uploaded by two at once: its parts hash to {present}, and not to "
                f"the {meant} of this commit; nothing was committed",
                {"version": self.begin.version, "digests": [present, meant]},
            )

    def committed(self) -> None:
        """Remove the trainer's bytes after the version was committed."""
        self.in_log = True
        if self.num_parts:
            logger.info(
                "version %d: %d parts of %.1f MB in all received in %.2f s, converted and stored %.2f s after the last",
                self.begin.version, self.num_parts, self._parts.nbytes / 1e6, self._received_at - self._begun_at,
                self._stored_at - self._received_at,
            )  # fmt: skip
        self._close_delta()
        self._remove_files()

    def status(self) -> WeightStatus:
        """Return the status of the staged version."""
        failure = self.failure
        return WeightStatus(
            version=self.begin.version,
            label=self.begin.label,
            delta_of=self.needs,
            state="staged",
            total_bytes=self.begin.nbytes,
            missing_parts=tuple(sorted(self.missing)),
            error=None if failure is None else Failure(type=type(failure).__name__, message=failure.message),
        )

    async def leave(self) -> None:
        """Stop converting, and leave the parts for the next process."""
        self._phase = Phase.LEFT
        await self._conversion.stop()
        self._close_delta()

    async def discard(self) -> None:
        """Stop converting and remove the files."""
        await self.leave()
        await asyncio.to_thread(self._remove_files)

    def _close_delta(self) -> None:
        if self._delta is not None:
            self._delta.close()

    def _remove_files(self) -> None:
        folder, parts = self._folders
        remove_tree(folder)
        self.space.release_all(parts, self._parts.nbytes)
        self._unmap_removed()

    def _unmap_removed(self) -> None:
        """Unmap removed files, whose memory is otherwise not freed."""
        if self._memory is not None:
            self._memory.mapped.prune()


def spread(batches: list[list[str]], threads: int) -> list[list[str]]:
    """Order batches such that threads that take one after the other work in different files."""
    apart = -(-len(batches) // threads)
    return [batches[i] for first in range(apart) for i in range(first, len(batches), apart)]


def parts_folder(folder: Path) -> Path:
    """Return the folder of the parts of the version that is staged in ``folder``."""
    return folder.with_name(f"{folder.name}.parts")
