"""A version between ``begin`` and ``commit``: what has arrived, what is converted, what went wrong."""

import asyncio
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

from rollout_service.errors import (
    InvalidManifest,
    NotFound,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.weights.convert import BATCH_BYTES, Converter, Named, tensor_bytes
from rollout_service.weights.manifest import StoredTensor
from rollout_service.weights.served_model import EMBEDDING, LM_HEAD, ServedModel
from rollout_service.weights.sources import FolderSource, PartFiles
from rollout_service.weights.upload import BeginUpload, num_parts, part_size
from rollout_service.weights.writer import VersionWriter


class StagedVersion:
    """Converts tensors in ``executor`` as soon as they are complete, so that upload and quantization overlap.

    Lives in the ingest's event loop; only the conversions run elsewhere. ``folder`` becomes the version's folder,
    ``folder.parts`` holds the trainer's bytes until then. Raises RolloutServiceError if the disk has no room for it.
    """

    def __init__(
        self,
        begin: BeginUpload,
        folder: Path,
        model: ServedModel,
        converter: Converter,
        part_bytes: int,
        executor: Executor,
    ) -> None:
        self.begin, self.part_bytes = begin, part_bytes
        self.missing = set(range(self.num_parts))
        self._tied, self._converter, self._executor = model.tied, converter, executor
        self._folders = folder, folder.with_name(f"{folder.name}.parts")
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)  # what an ingest that died left behind
            path.mkdir(parents=True)
        try:
            self._writer = VersionWriter(folder, converter.slots(model.shapes))
        except OSError as error:
            self.remove_files()
            raise RolloutServiceError(f"version {begin.version} cannot be laid out in {folder}: {error}") from error
        self._parts = PartFiles(self._folders[1], begin.tensors, part_bytes)
        self._source: PartFiles | FolderSource = self._parts
        self._digests: dict[int, str] = {}
        self._lacking: dict[str, int] = {}
        self._tensors_of_part: dict[int, list[str]] = defaultdict(list)
        self._conversions: list[Future[None]] = []
        self._failure: RolloutServiceError | None = None
        self._discarded = False

    @property
    def num_parts(self) -> int:
        """Parts of the whole upload."""
        return num_parts(self.begin.nbytes, self.part_bytes)

    def part_size(self, part: int) -> int:
        """Bytes that a part must have."""
        return part_size(part, self.begin.nbytes, self.part_bytes)

    def part_path(self, part: int) -> Path:
        """Where a whole part lies."""
        return self._parts.path(part)

    def expect_parts(self) -> None:
        """Convert each tensor once its last part is there, together with the others of which that part is the last."""
        empty = []
        for tensor in self.begin.tensors:
            parts = self._parts.parts_of(tensor.name)
            self._lacking[tensor.name] = len(parts)
            for part in parts:
                self._tensors_of_part[part].append(tensor.name)
            if not parts:
                empty.append(tensor.name)
        self._convert(empty)

    def convert_folder(self, source: FolderSource) -> None:
        """Convert all tensors of a folder in the background."""
        self._source = source
        for names in source.batches(BATCH_BYTES):
            self._convert(names)

    def accept(self, part: int, digest: str, received: Path) -> None:
        """Take in a part whose size and digest were checked. The same part again changes nothing.

        Raises VersionConflict if other bytes came under the same number before, NotFound if the version was discarded
        while the part was on its way.
        """
        if self._discarded:
            raise NotFound(f"version {self.begin.version} was discarded before part {part} was complete: begin anew")
        known = self._digests.get(part)
        if known is not None and known != digest:
            raise VersionConflict(
                f"part {part} of version {self.begin.version} came with digest {known} before and {digest} now: "
                "DELETE the staged version to begin anew",
                {"part": part, "digests": [known, digest]},
            )
        if known is not None:
            return
        received.replace(self.part_path(part))
        self._digests[part] = digest
        self.missing.discard(part)
        for name in self._tensors_of_part[part]:
            self._lacking[name] -= 1
        self._convert([name for name in self._tensors_of_part[part] if self._lacking[name] == 0])

    async def finish(self) -> tuple[StoredTensor, ...]:
        """Wait for the conversions and sync. Raises UploadIncomplete, or what the first failed conversion raised."""
        if self.missing:
            raise UploadIncomplete(
                f"version {self.begin.version} lacks {len(self.missing)} of {self.num_parts} parts",
                {"missing_parts": sorted(self.missing)[:1000]},
            )
        await asyncio.gather(*map(asyncio.wrap_future, self._conversions))
        tensors: tuple[StoredTensor, ...] = ()
        if self._failure is None:
            tensors = await asyncio.get_running_loop().run_in_executor(self._executor, self._finish)
        if self._failure is not None:
            raise self._failure
        return tensors

    def failure(self) -> RolloutServiceError | None:
        """What the first conversion that failed raised, if one has: this version is lost and must begin anew."""
        return self._failure

    async def discard(self) -> None:
        """Stop converting and remove the files."""
        self._discarded = True
        # a conversion that runs cannot be cancelled, and must not write once its file is closed
        running = [conversion for conversion in self._conversions if not conversion.cancel()]
        await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
        self._writer.close()
        await asyncio.to_thread(self.remove_files)

    def remove_files(self) -> None:
        """Remove what is left of the folders: after a commit, the trainer's bytes."""
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)

    def _convert(self, names: Sequence[str]) -> None:
        if names:
            self._conversions.append(self._executor.submit(self._store, names))

    def _store(self, names: Sequence[str]) -> None:
        if self._failure is None:
            with self._failures_kept():
                self._write(self._source.read(names))

    def _write(self, tensors: Iterable[Named]) -> None:
        for name, tensor in self._converter.convert(tensors):
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
        except RolloutServiceError as error:
            self._failure = error
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError, for a GPU without room among others
            self._failure = RolloutServiceError(f"version {self.begin.version} could not be stored: {error}")


def _require_equal_heads(tensors: tuple[StoredTensor, ...]) -> None:
    # vLLM on a GPU drops the head of a tied model: other weights in it would be lost without a word
    digests = {tensor.digest for tensor in tensors if tensor.name in (LM_HEAD, EMBEDDING)}
    if len(digests) > 1:
        raise InvalidManifest(
            f"{LM_HEAD} differs from {EMBEDDING}, but the model's config.json ties them: send equal ones, or the "
            "embedding alone"
        )
