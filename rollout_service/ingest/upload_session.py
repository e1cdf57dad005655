"""A version between ``begin`` and ``commit``: what has arrived, what is converted, what went wrong."""

import asyncio
import errno
import logging
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path

from rollout_service.errors import (
    InvalidManifest,
    LogCorrupt,
    NotFound,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.ingest.sources.ray_objects import RefSource
from rollout_service.ingest.sources.sources import FolderSource, PartFiles
from rollout_service.metrics.process import counted_conversion
from rollout_service.model.convert import BATCH_BYTES, Converter, Named, tensor_bytes
from rollout_service.model.served_model import EMBEDDING, LM_HEAD, ServedModel
from rollout_service.protocol.base import Failure
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.protocol.upload import BeginUpload, part_size
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.direct_io import BufferPool
from rollout_service.store.durable_io import DISK_FULL, no_room, remove_tree
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.unquantized import UnquantizedCopy
from rollout_service.store.upload_record import UploadRecord, read_record, write_record
from rollout_service.store.writer import VersionWriter
from rollout_service.threads import io_threads

logger = logging.getLogger(__name__)

FAILURES = (RolloutServiceError, OSError, RuntimeError)
"""What reading, converting and writing raise; torch raises RuntimeError, for a GPU without room among others."""


class UploadSession:
    """Converts tensors in ``executor`` as soon as they are complete, so that upload and quantization overlap.

    Lives in the ingest's event loop; only the conversions run elsewhere. ``folder`` becomes the version's folder,
    ``folder.parts`` holds the trainer's bytes until then, and outlives the process: the same upload begun again has
    the parts that it had. Raises InsufficientStorage if the disk has no room for both.
    """

    def __init__(
        self,
        begin: BeginUpload,
        folder: Path,
        model: ServedModel,
        converter: Converter,
        part_bytes: int,
        executor: Executor,
        source_stamp: str = "",
        part_memory: BufferPool | None = None,
        copy: UnquantizedCopy | None = None,
    ) -> None:
        self._folders = folder, parts_folder(folder)
        record = UploadRecord(begin=begin, part_bytes=part_bytes, source_stamp=source_stamp)
        self.record = self._left_behind(record) or record
        self.begin, self.part_bytes = self.record.begin, self.record.part_bytes
        self.missing = set(range(self.num_parts))
        self._tied, self._converter, self._executor = model.tied, converter, executor
        self._copy = copy
        self._writer = self._layout(converter.slots(model.shapes))
        self._parts = PartFiles(self._folders[1], self.begin.tensors, self.part_bytes)
        self._source: PartFiles | FolderSource | RefSource = self._parts
        self.part_memory = part_memory or BufferPool(0)
        """Where parts may lie until their tensors are converted, beside their files."""
        self.digests: dict[int, str] = {}
        """Of the parts that are there."""
        self.touched_at = time.monotonic()
        """When something last came, on this process's own clock: the wall clock may be set."""
        self._senders: dict[int, str] = {}
        self._stored: tuple[StoredTensor, ...] | None = None
        self._closing = False
        self._lacking: dict[str, int] = {}
        self._tensors_of_part: dict[int, list[str]] = defaultdict(list)
        self._unconverted: dict[int, int] = defaultdict(int)
        self._counting = threading.Lock()
        self._conversions: list[Future[None]] = []
        self._failure: RolloutServiceError | None = None
        self._failed: dict[str, RolloutServiceError] = {}
        """Tensors that could not be converted as they came, in parts that may be replaced yet."""
        self._discarded = False

    def _left_behind(self, record: UploadRecord) -> UploadRecord | None:
        """The record of the same upload, if an ingest that died left it here; removes everything else."""
        folder, parts = self._folders
        remove_tree(folder)  # made again from the parts
        folder.mkdir(parents=True, exist_ok=True)  # on NFS, what some process has open is in it still
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

    def _layout(self, slots: Iterable[TensorSlot]) -> VersionWriter:
        folder, parts = self._folders
        slots, written = list(slots), sum(path.lstat().st_size for path in parts.glob("part-*"))
        stored_bytes, part_bytes = sum(slot.nbytes for slot in slots), self.begin.nbytes - written
        try:
            writer = VersionWriter(folder, slots)
            try:
                if shutil.disk_usage(parts).free < part_bytes:
                    raise OSError(errno.ENOSPC, "no room for the parts")
                write_record(parts, self.record)
            except OSError:
                writer.close()
                raise
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not written:
                shutil.rmtree(parts, ignore_errors=True)
            what = f"version {self.begin.version} ({stored_bytes} bytes as stored, {part_bytes} of parts to come)"
            if error.errno in DISK_FULL:
                raise no_room(what, folder.parent, stored_bytes + part_bytes) from error
            raise RolloutServiceError(f"{what} cannot be laid out in {folder}: {error}") from error
        return writer

    @property
    def num_parts(self) -> int:
        """Parts of the whole upload."""
        return self.record.num_parts

    def complete_record(self) -> UploadRecord:
        """What is to be remembered of the upload once every part is there."""
        return self.record.model_copy(update={"part_digests": tuple(self.digests[i] for i in range(self.num_parts))})

    def part_size(self, part: int) -> int:
        """Bytes that a part must have."""
        return part_size(part, self.begin.nbytes, self.part_bytes)

    def incoming_path(self, part: int) -> Path:
        """Where one sender may put a part until it is whole; another file at each call."""
        return self._folders[1] / f"part-{part:06d}.{uuid.uuid4().hex}.incoming"

    def expect_parts(self) -> None:
        """Convert each tensor once its last part is there, together with the others of which that part is the last.

        Raises OSError for a part of an earlier process that can neither be read nor removed; every file is closed then.
        """
        empty = []
        for tensor in self.begin.tensors:
            parts = self._parts.parts_of(tensor.name)
            self._lacking[tensor.name] = len(parts)
            for part in parts:
                self._tensors_of_part[part].append(tensor.name)
                self._unconverted[part] += 1
            if not parts:
                empty.append(tensor.name)
        self._convert(empty)
        try:
            found = [self._folders[1].stat().st_mtime]
            for number, digest, path in self._parts.left_behind():
                found.append(path.stat().st_mtime)
                self.accept(number, digest, path)
        except OSError:
            self._discarded = True
            wait([conversion for conversion in self._conversions if not conversion.cancel()])
            self._close_files()
            remove_tree(self._folders[0])
            if self._copy is not None:
                self._copy.remove_files()
            raise
        if self.digests:  # only the files tell how long ago their ingest took them in
            self.touched_at = time.monotonic() - max(0.0, time.time() - max(found))

    def convert_folder(self, source: FolderSource | RefSource) -> None:
        """Convert all tensors of a folder or of objects in the background."""
        self._source = source
        for names in spread(list(source.batches(BATCH_BYTES)), io_threads()):
            self._convert(names)

    def accept(
        self, part: int, digest: str, received: Path, uploader: str = "", data: memoryview | None = None
    ) -> None:
        """Take in a part whose size and digest were checked. The same part again changes nothing.

        ``data``: the same bytes in memory, if they are there still.

        Of two uploaders at once, the one that began the version has its way. Raises VersionConflict if other bytes
        came under the same number before, NotFound if the version was discarded while the part was on its way.
        """
        if self._discarded:
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
        replaced = self._parts.add(part, digest, received, data)
        self.digests[part], self._senders[part] = digest, uploader
        self.missing.discard(part)
        before: list[Future[None]] = []
        if replaced is None:
            for name in self._tensors_of_part[part]:
                self._lacking[name] -= 1
        else:  # they may be reading what is replaced, and must not write after those that read it anew
            before = list(self._conversions)
            self._conversions.append(self._executor.submit(_after, before, replaced.unlink))
        self._convert([name for name in self._tensors_of_part[part] if self._lacking[name] == 0], before)

    def _gives_way(self, part: int, uploader: str) -> bool:
        """Whether what is there came from another than the uploader that began, and that one is sending now."""
        began = bool(uploader) and uploader == self.begin.uploader
        return began and self._senders.get(part) != uploader and not self._closing

    def check_upload_digest(self, meant: str | None) -> None:
        """Raises VersionConflict if a committer means other parts than these."""
        present = self.complete_record().upload_digest
        if meant is not None and meant != present:
            raise VersionConflict(
                f"version {self.begin.version} was uploaded by two at once: its parts hash to {present}, and not to "
                f"the {meant} of this commit; nothing was committed",
                {"version": self.begin.version, "digests": [present, meant]},
            )

    async def finish(self, meant: str | None = None) -> tuple[StoredTensor, ...]:
        """Wait for the conversions and sync; once is enough, and again does no harm.

        Raises UploadIncomplete, VersionConflict if ``meant`` is not the upload's digest, or what the first failed
        conversion raised.
        """
        if self.missing:
            raise self.failure() or UploadIncomplete(
                f"version {self.begin.version} lacks {len(self.missing)} of {self.num_parts} parts",
                {"missing_parts": sorted(self.missing)[:1000]},
            )
        self.check_upload_digest(meant)
        self._closing = True
        await asyncio.gather(*map(asyncio.wrap_future, self._conversions))
        if self._stored is None and self.failure() is None:
            self._stored = await asyncio.get_running_loop().run_in_executor(self._executor, self._finish)
        if (failure := self.failure()) is not None:
            raise failure
        assert self._stored is not None
        return self._stored

    def keep_copy(self, digest: str) -> None:
        """The version has been committed under that digest: so is its unquantized copy, if there is one."""
        if self._copy is not None:
            self._copy.commit(digest)

    def status(self) -> WeightStatus:
        """As it is shown."""
        failure = self.failure()
        return WeightStatus(
            version=self.begin.version,
            state="staged",
            total_bytes=self.begin.nbytes,
            missing_parts=tuple(sorted(self.missing)),
            error=None if failure is None else Failure(type=type(failure).__name__, message=failure.message),
        )

    def failure(self) -> RolloutServiceError | None:
        """What the first conversion that failed raised, if one has: this version is lost and must begin anew.

        Unless what it read was a part of another uploader, and the one that began sends its own in place of it.
        """
        return self._failure or next(iter(list(self._failed.values())), None)

    async def discard(self) -> None:
        """Stop converting and remove the files."""
        await self.leave()
        await asyncio.to_thread(self.remove_files)

    async def leave(self) -> None:
        """Stop converting, and leave the parts to the next process."""
        self._discarded = True
        # a conversion that runs cannot be cancelled, and must not write once its file is closed
        running = [conversion for conversion in self._conversions if not conversion.cancel()]
        await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
        self._close_files()

    def _close_files(self) -> None:
        self._writer.close()
        if self._copy is not None:
            self._copy.close()

    def remove_files(self) -> None:
        """Remove what is left of the folders: after a commit, the trainer's bytes."""
        for path in self._folders:
            remove_tree(path)
        if self._copy is not None:
            self._copy.remove_files()

    def _convert(self, names: Sequence[str], after: Sequence[Future[None]] = ()) -> None:
        if names:
            self._conversions.append(self._executor.submit(_after, after, self._store, names))

    def _store(self, names: Sequence[str]) -> None:
        if self._source is not self._parts:
            if self._failure is None:
                with self._failures_kept():
                    self._write(self._source.read(names))
            return
        failed = self._stored_or_failed(names)
        if failed and len(names) > 1:  # the others of them are sound, and only what is at fault may be sent anew
            failed = {name: failure for each in names for name, failure in self._stored_or_failed([each]).items()}
        with self._counting:
            for name in names:
                self._failed.pop(name, None)
            self._failed |= failed
            for part in (part for name in names for part in self._parts.parts_of(name)):
                self._unconverted[part] -= 1
                if self._unconverted[part] <= 0:
                    self._parts.forget(part)

    def _stored_or_failed(self, names: Sequence[str]) -> dict[str, RolloutServiceError]:
        try:
            self._write(self._parts.read(names))
        except FAILURES as error:
            return dict.fromkeys(names, self._failure_of(error))
        return {}

    def _write(self, tensors: Iterable[Named]) -> None:
        if self._copy is not None:
            tensors = self._copy.taken(tensors)
        for name, tensor in counted_conversion(self._converter.convert, tensors):
            self._writer.write(name, tensor_bytes(tensor))

    def _finish(self) -> tuple[StoredTensor, ...]:
        tensors: tuple[StoredTensor, ...] = ()
        with self._failures_kept():
            if self._tied and LM_HEAD in self._writer.unwritten:
                # a CPU engine packs its own copy of a tied head and never refreshes it from the embedding
                self._write((LM_HEAD, tensor) for _, tensor in self._source.read([EMBEDDING]))
            tensors = self._writer.finish()
            if self._tied:
                _require_equal_heads(tensors)
        return tensors

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self._failure = self._failure or self._failure_of(error)

    def _failure_of(self, error: Exception) -> RolloutServiceError:
        if isinstance(error, RolloutServiceError):
            return error
        return RolloutServiceError(f"version {self.begin.version} could not be stored: {error}")


def _after(earlier: Sequence[Future[None]], work: Callable[..., None], *args: object) -> None:
    wait(earlier)  # all of them began before this did, so none of them waits for a thread
    work(*args)


def spread(batches: list[list[str]], threads: int) -> list[list[str]]:
    """So ordered that threads which take one after the other are far apart, in files of their own."""
    apart = -(-len(batches) // threads)
    return [batches[i] for first in range(apart) for i in range(first, len(batches), apart)]


def parts_folder(folder: Path) -> Path:
    """Where the parts of the version that is staged in ``folder`` lie."""
    return folder.with_name(f"{folder.name}.parts")


def _require_equal_heads(tensors: tuple[StoredTensor, ...]) -> None:
    # vLLM on a GPU drops the head of a tied model: other weights in it would be lost without a word
    digests = {tensor.digest for tensor in tensors if tensor.name in (LM_HEAD, EMBEDDING)}
    if len(digests) > 1:
        raise InvalidManifest(
            f"{LM_HEAD} differs from {EMBEDDING}, but the model's config.json ties them: send equal ones, or the "
            "embedding alone"
        )
