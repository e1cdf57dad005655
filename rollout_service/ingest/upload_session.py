"""The upload of one version, from ``begin`` to ``commit``.

tensors come from        parts that a trainer sends (staged_parts.py); a source that has all of them, such as a folder
                         (sources/source.py); a broadcast or shared memory, a few at a time
                         (sources/shared_memory.py); or an older version in the log, with changes that come
                         in parts (sources/delta.py)
they are converted       in the background, in buckets (conversion.py), as soon as a bucket is complete
states of a session      receiving → closing → committed; or failed; or left: discarded, or resumed by the next
                         process, which finds the parts and the record on disk
"""

import asyncio
import errno
import logging
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path

from rollout_service.errors import (
    InvalidDelta,
    LogCorrupt,
    NotFound,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.ingest.conversion import Bucket, Conversion, GpuBatch, TiedHead
from rollout_service.ingest.resources import Resources
from rollout_service.ingest.sources.delta import DeltaOfVersion, ReceivedChanges
from rollout_service.ingest.sources.shared_memory import GPU_BYTES
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.ingest.staged_parts import Incoming, StagedParts, StreamBucket, stream_buckets
from rollout_service.model.convert import BATCH_BYTES, Named
from rollout_service.protocol.base import NEXT, Failure
from rollout_service.protocol.upload import BeginUpload, BroadcastSource, SharedMemorySource
from rollout_service.protocol.weights import UploadTimings, WeightStatus
from rollout_service.runtime.threads import compute_threads
from rollout_service.store.durable_io import DISK_FULL, no_room, not_written, remove_tree
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.staged_file import StagedFile
from rollout_service.store.upload_record import STAGED_FILE, UploadRecord, read_record, write_record
from rollout_service.store.writer import VersionWriter

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Time in seconds in which a sender may finish a part that another has begun to send, too."""


class Phase(Enum):
    """The state of a session. A failed conversion is not a phase, since it may be repaired: see ``failure``."""

    RECEIVING = "parts may come, and replace others"
    CLOSING = "a commit has begun: what is there is what is committed"
    COMMITTED = "the version is in the log"
    LEFT = "nothing comes in or is converted any more"


class UploadSession:
    """Converts tensors in threads as soon as they are complete, so that upload and quantization overlap.

    Lives in the ingest's event loop; only the conversions run in threads. ``folder`` becomes the version's folder.
    Until then, ``folder.parts`` holds the trainer's bytes. It survives a restart: if the same upload is begun again,
    its parts are still there.
    """

    def __init__(
        self,
        begin: BeginUpload,
        folder: Path,
        resources: Resources,
        source: WeightSource | None = None,
        delta: DeltaOfVersion | None = None,
    ) -> None:
        """
        Args:
            source: has all tensors; None: they come in parts, or through ``convert``.
            delta: produces the tensors from the parts, and is closed when the session ends; None: the parts hold the
                tensors.

        Raises InsufficientStorage if the disk is full, RolloutServiceError if its files cannot be laid out, OSError for
        an earlier process's journal, or InvalidDelta for a part of another delta. All files are closed then.
        """
        self.folder, self._resources, self._delta = folder, resources, delta
        stamp = "" if source is None else source.stamp
        self._to_come: set[str] = set()
        if isinstance(begin.source, SharedMemorySource):
            stamp = begin.source.transfer
            self._to_come = {tensor.name for tensor in begin.announced_tensors}
        record = UploadRecord(begin=begin, part_bytes=resources.part_bytes, source_stamp=stamp)
        left = self._left_behind(record)
        self.record = left or record
        model = resources.model
        self._tied = TiedHead(model.head, model.embedding) if model.tied and model.head in model.stored else None
        self._may_miss_tensors = isinstance(begin.source, BroadcastSource)
        self._batches: dict[int, asyncio.Task[None]] = {}
        writer, file = self._laid_out(may_have_parts=left is not None)
        convert = (delta or resources.converter).convert
        self._conversion = Conversion(begin.version, writer, convert, resources.executor, resources.gpu_executor)
        if self._conversion.gpu is not None:
            self._conversion.plans = resources.plans
        self.parts = StagedParts(file, self.record.slots)
        self._buckets: list[StreamBucket] = []
        self._changes: ReceivedChanges | None = None
        self._read_delta: Callable[[Sequence[str]], Iterable[Named]] | None = None
        if delta is not None:
            self._changes = ReceivedChanges(self.parts, self.begin)
            slot = writer.slot if writer.has_slots else None
            self._read_delta = delta.reading(self._changes.read, slot, self._conversion.gpu)
        elif begin.source is None:
            self._buckets = stream_buckets(self.begin.tensors, self.record.part_bytes)
        self.touched_at = time.monotonic()
        """Time of the last arrival on this process's monotonic clock: the wall clock may be set."""
        self._begun_at = self._received_at = self._stored_at = time.monotonic()
        self._phase = Phase.RECEIVING
        if source is None:
            self._recover_parts()
        else:
            for names in reading_order(source, compute_threads()):
                self._conversion.begin(Bucket(names, partial(source.read, names)))

    @property
    def begin(self) -> BeginUpload:
        """Return the announcement."""
        return self.record.begin

    def _left_behind(self, record: UploadRecord) -> UploadRecord | None:
        """Return the record of the same upload, if an earlier ingest left one; remove all other files."""
        folder, parts = self.folder, parts_folder(self.folder)
        try:
            known = read_record(parts)
        except (LogCorrupt, OSError) as error:
            logger.warning("what was staged of version %d is dropped: %s", record.begin.version, error)
            known = None
        remove_tree(folder)  # it is rebuilt from the parts
        folder.mkdir(parents=True, exist_ok=True)  # on NFS, files that some process has open stay in the folder
        if known is None or not known.begin.describes_what(record.begin) or known.source_stamp != record.source_stamp:
            remove_tree(parts)
            parts.mkdir(parents=True, exist_ok=True)
            return None
        return known

    def _laid_out(self, *, may_have_parts: bool) -> tuple[VersionWriter, StagedFile]:
        """Return the files of the version, and that of its parts.

        ``may_have_parts``: True if an earlier process left a record of this upload. Its parts stay after an error.
        """
        folder, parts, space = self.folder, parts_folder(self.folder), self._resources.space
        stored_bytes = self._resources.layout.nbytes
        # a delta's size is unknown yet: a part that does not fit is refused later
        part_bytes = self.begin.nbytes if self.begin.delta is None else 0
        file, writer = None, None
        try:
            # without a delta, room is found before a slot is made for each part: a huge upload would have millions
            staged_bytes = part_bytes or max((slot.end for slot in self.record.slots), default=0)
            file = space.open(parts / STAGED_FILE, staged_bytes)
            part_bytes = max(0, part_bytes - file.allocated_bytes)
            space.make_room(folder, stored_bytes + part_bytes)
            writer = VersionWriter(folder, self._resources.layout, self._resources.memory)
            if shutil.disk_usage(parts).free < part_bytes:
                raise OSError(errno.ENOSPC, "no room for the parts")
            write_record(parts, self.record)
        except OSError as error:
            if writer is not None:
                writer.close()
            if file is not None:
                file.close()
            shutil.rmtree(folder, ignore_errors=True)
            self._resources.unmap_removed()
            if not may_have_parts:
                shutil.rmtree(parts, ignore_errors=True)
            what = f"version {self.begin.version} ({stored_bytes} bytes as stored, {part_bytes} of parts to come)"
            if error.errno in DISK_FULL:
                raise no_room(what, folder.parent, stored_bytes + part_bytes) from error
            raise not_written(f"{what} cannot be laid out in {folder}", error, "push it again") from error
        return writer, file

    def _recover_parts(self) -> None:
        """Take in the parts that an earlier process received."""
        try:
            found = list(self.parts.recover())
            if found:  # only the files tell when
                self.touched_at = time.monotonic() - max(0.0, time.time() - self.parts.modified_at)
            self._begin_complete(range(len(self._buckets)))
            if self._changes is not None:
                for part in found:
                    self._begin_delta(part, self._changes.add(part, self.parts.sizes[part]))
        except (OSError, InvalidDelta):
            self._phase = Phase.LEFT
            self._conversion.stop_and_wait()
            self.parts.file.close()
            remove_tree(self.folder)
            self._resources.unmap_removed()
            raise

    @property
    def in_log(self) -> bool:
        """Return True once the version is committed."""
        return self._phase is Phase.COMMITTED

    @property
    def is_left(self) -> bool:
        """Return True once the version was discarded, or its ingest ends."""
        return self._phase is Phase.LEFT

    @property
    def needs(self) -> int | None:
        """Return the version in the log from which this one is made; None: there is none."""
        return None if self._delta is None else self._delta.base

    @property
    def received_bytes(self) -> int:
        """Return the received bytes: of parts, or of the tensors of another source."""
        return self.parts.nbytes if self.begin.source is None else self._conversion.read_bytes

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
    def failure(self) -> RolloutServiceError | None:
        """Return the known error because of which this version cannot be committed; see ``Conversion.failure``."""
        return self._conversion.failure

    def complete_record(self) -> UploadRecord:
        """Return the record of the upload, once every part is there."""
        return self.record.model_copy(
            update={
                "part_digests": tuple(self.parts.digests[part] for part in range(self.record.num_parts)),
                "delta_bytes": None if self._delta is None else self.parts.nbytes,
            }
        )

    async def begin_part(
        self, part: int, nbytes: int, digest: str, uploader: str, abort: Callable[[], None]
    ) -> Incoming | None:
        """Begin to receive a part of ``nbytes``, for ``accept``. None: it is there with the same bytes.

        Other bytes replace a part that is there. Raises VersionConflict if a newer announcement has taken over, or a
        commit has begun; NotFound if the version was discarded. ``abort``: ends the sending.
        """
        while (other := self.parts.receiving(part)) is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(other.ended.wait(), GRACE_S)
                continue
            other.abort()
            await other.ended.wait()
        self._require_owner(part, uploader)
        self.touched_at = time.monotonic()
        known = self.parts.digests.get(part)
        if known == digest:
            return None
        if known is not None and self._phase is not Phase.RECEIVING:
            raise VersionConflict(
                f"part {part} of version {self.begin.version} came with digest {known} before and {digest} now, and "
                "its commit has begun: push a newer version, or DELETE it",
                {"part": part, "digests": [known, digest]},
            )
        incoming = self.parts.begin(part, nbytes, abort)
        if known is not None:
            self.parts.forget(part)
        try:  # also if it is not there: the sender that replaced it may have left while its old bytes were read
            await self._conversion.forget(self._keys_of(part))
        except BaseException:  # or the next sender of the part would wait for this one for ever
            self.parts.end(incoming)
            raise
        return incoming

    async def accept(self, incoming: Incoming, digest: str, uploader: str = "") -> None:
        """Take in a part that was received, and whose digest was checked.

        Raises as ``begin_part``, and InvalidDelta for a part of a delta that cannot be read.
        """
        try:
            self._require_owner(incoming.part, uploader)
            part = incoming.part
            names = [] if self._changes is None else self._changes.add(part, incoming.nbytes)
            self.parts.add(incoming, digest)
            self._received_at = time.monotonic()
            if self._changes is None:
                self._begin_complete(self._keys_of(part))
            else:
                self._begin_delta(part, names)
        finally:
            self.parts.end(incoming)

    def _require_owner(self, part: int, uploader: str) -> None:
        """Raise NotFound once discarded, VersionConflict for a part of an older push: the last announcement owns it."""
        if self._phase is Phase.LEFT:
            raise NotFound(f"version {self.begin.version} was discarded before part {part} was complete: begin anew")
        owner = self.begin.uploader
        if owner and uploader and uploader != owner:
            raise VersionConflict(
                f"version {self.begin.version} is being uploaded by a push that was announced later: push another "
                f"version, such as {NEXT!r}",
                {"version": self.begin.version},
            )

    def _keys_of(self, part: int) -> Sequence[int]:
        """Return the keys of the conversions that read a part: the numbers of buckets, or that of a delta's part."""
        if self._delta is not None:
            return [part]
        first = bisect_left(self._buckets, part, key=lambda bucket: bucket.last_part)
        end = bisect_right(self._buckets, part, key=lambda bucket: bucket.first_part)
        return [number for number in range(first, end) if part in self._buckets[number].parts]

    def _begin_complete(self, numbers: Iterable[int]) -> None:
        """Convert those of the buckets whose parts are all there."""
        gpu = self._conversion.gpu
        for number in numbers:
            bucket = self._buckets[number]
            if not self.parts.missing.isdisjoint(bucket.parts):
                continue
            work = Bucket([tensor.name for tensor in bucket.tensors], partial(bucket.read, self.parts.file))
            # larger tensors would take too much of the GPU's memory if copied whole
            fits = 0 < bucket.nbytes <= GPU_BYTES
            if gpu and fits and self.parts.file.is_registered(bucket.offset, bucket.nbytes):
                batch = GpuBatch(bucket.tensors, partial(bucket.copied, self.parts.file, gpu))
                work = work._replace(batch=batch, in_turns=True)
            self._conversion.begin(work, number)

    def _begin_delta(self, part: int, names: list[str]) -> None:
        assert self._delta is not None and self._read_delta is not None
        # with a GPU, a thread of a delta launches kernels and waits for them
        in_turns = self._conversion.gpu is not None
        for batch in self._delta.batches(names, BATCH_BYTES):
            self._conversion.begin(Bucket(batch, partial(self._read_delta, batch), in_turns=in_turns), part)

    def convert(self, bucket: Bucket) -> Future[None]:
        """Convert tensors of a broadcast, each once. See ``Conversion.begin``.

        Raises NotFound if the version was discarded meanwhile.
        """
        if self._phase is not Phase.RECEIVING:
            raise self._dropped()
        self.touched_at = self._received_at = time.monotonic()
        return self._conversion.begin(bucket)

    def _dropped(self) -> NotFound:
        return NotFound(f"version {self.begin.version} was dropped while its tensors came: begin anew")

    @property
    def lacks_tensors(self) -> bool:
        """Return True while tensors have yet to come through shared memory."""
        return bool(self._to_come)

    def convert_shared(self, number: int, buckets: Sequence[Bucket]) -> asyncio.Task[None]:
        """Convert a batch of tensors in a trainer's memory. The task ends once they are no longer read.

        Repeating a batch number returns the same task. The task raises NotFound if the version was discarded meanwhile,
        or the error of the first failed conversion.
        """
        if number not in self._batches:
            self._batches[number] = asyncio.create_task(self._convert_shared(buckets))
        return self._batches[number]

    async def _convert_shared(self, buckets: Sequence[Bucket]) -> None:
        converting = [self.convert(bucket) for bucket in buckets]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, converting))
        except asyncio.CancelledError:
            raise self._dropped() from None
        self._to_come.difference_update(*(bucket.names for bucket in buckets))
        self._received_at = time.monotonic()
        if (failure := self.failure) is not None:
            raise failure

    def all_came(self) -> None:
        """Allow the commit: a broadcast has brought every tensor."""
        self._may_miss_tensors = False

    def renumber(self, version: int, folder: Path) -> None:
        """Change the version number, before the session is finished. Raises OSError, and then keeps the old number."""
        record = self.record.model_copy(update={"begin": self.begin.model_copy(update={"version": version})})
        write_record(parts_folder(self.folder), record)
        for path in (folder, parts_folder(folder)):  # such folders are left over: Uploads knows no version there
            remove_tree(path)
        self.folder.rename(folder)
        parts_folder(self.folder).rename(parts_folder(folder))
        self.record, self.folder = record, folder
        self.parts.file.path = parts_folder(folder) / STAGED_FILE
        self._conversion.version = version

    def rename(self, **changes: str | None) -> None:
        """Change the ``uploader`` that owns the upload, or the trainer's ``label``. Raises OSError."""
        record = self.record.model_copy(update={"begin": self.begin.model_copy(update=changes)})
        write_record(parts_folder(self.folder), record)
        self.record = record

    async def finish(self, meant: str | None = None) -> tuple[StoredTensor, ...]:
        """Wait for the conversions and sync; may be called again.

        Raises UploadIncomplete, VersionConflict if ``meant`` is not the upload's digest, or the error of the first
        failed conversion.
        """
        if missing := sorted(self.parts.missing):
            raise self.failure or UploadIncomplete(
                f"version {self.begin.version} lacks {len(missing)} of {self.record.num_parts} parts: send them, and "
                "commit it again",
                {"missing_parts": missing[:1000]},
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
        present = self.complete_record().upload_digest
        if meant is not None and meant != present:
            raise VersionConflict(
                f"version {self.begin.version} was announced again since: its parts hash to {present}, and not to the "
                f"{meant} of this commit; nothing was committed",
                {"version": self.begin.version, "digests": [present, meant]},
            )
        if self._phase is Phase.RECEIVING:
            self._phase = Phase.CLOSING
        check = None if self._delta is None else self._delta.require_announced
        stored = await self._conversion.finish(tied=self._tied, check=check)
        self._stored_at = time.monotonic()
        return stored

    def committed(self) -> None:
        """Remove the trainer's bytes after the version was committed."""
        self._phase = Phase.COMMITTED
        if self.record.num_parts:
            logger.info(
                "version %d: %d parts of %.1f MB in all received in %.2f s, converted and stored %.2f s after the last",
                self.begin.version, self.record.num_parts, self.parts.nbytes / 1e6, self._received_at - self._begun_at,
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
            missing_parts=tuple(sorted(self.parts.missing)),
            error=None if failure is None else Failure(type=type(failure).__name__, message=failure.message),
        )

    async def close(self) -> None:
        """Stop converting and close the file of the parts, which stay for the next process."""
        await self._leave()
        self.parts.file.close()

    async def discard(self) -> None:
        """Stop converting and remove the files."""
        await self._leave()
        await asyncio.to_thread(self._remove_files)

    async def _leave(self) -> None:
        self._phase = Phase.LEFT
        await self._conversion.stop()
        self._close_delta()

    def _close_delta(self) -> None:
        if self._delta is not None:
            self._delta.close()

    def _remove_files(self) -> None:
        remove_tree(self.folder)
        # a sender that still writes into the file must not write into the next upload
        self._resources.space.release(self.parts.file, keep=not self.parts.is_receiving)
        remove_tree(parts_folder(self.folder))
        self._resources.unmap_removed()


def reading_order(source: WeightSource, threads: int) -> list[list[str]]:
    """Return the batches of a source in the order in which threads take them.

    Large tensors come first: a thread that began an embedding last would work alone. The other batches are spread, such
    that threads that take one after the other work in different files.
    """
    sizes = {tensor.name: tensor.nbytes for tensor in source.table}
    batches = list(source.batches(BATCH_BYTES))
    apart = -(-len(batches) // threads)
    spread = [batches[i] for first in range(apart) for i in range(first, len(batches), apart)]
    return sorted(spread, key=lambda names: max(BATCH_BYTES, sum(sizes[name] for name in names)), reverse=True)


def parts_folder(folder: Path) -> Path:
    """Return the folder of the parts of the version that is staged in ``folder``."""
    return folder.with_name(f"{folder.name}.parts")
