"""A version between ``begin`` and ``commit``: what has arrived, what is converted, what went wrong."""

import asyncio
import shutil
from collections import defaultdict
from concurrent.futures import Executor
from pathlib import Path

from rollout_service.errors import RolloutServiceError, UploadIncomplete, VersionConflict
from rollout_service.quant.recipe import QuantPlan
from rollout_service.weights.convert import store, version_slots
from rollout_service.weights.manifest import StoredTensor
from rollout_service.weights.served_model import EMBEDDING, LM_HEAD, ServedModel
from rollout_service.weights.sources import FolderSource, PartFiles
from rollout_service.weights.upload import BeginUpload, num_parts, part_size
from rollout_service.weights.writer import VersionWriter


class StagedVersion:
    """Converts tensors in ``executor`` as soon as they are complete, so that upload and quantization overlap.

    Lives in the ingest's event loop; only the conversions run elsewhere. ``folder`` becomes the version's folder,
    ``folder.parts`` holds the trainer's bytes until then.
    """

    def __init__(
        self,
        begin: BeginUpload,
        folder: Path,
        model: ServedModel,
        plan: QuantPlan,
        part_bytes: int,
        executor: Executor,
    ) -> None:
        self.begin, self.part_bytes = begin, part_bytes
        self.missing = set(range(self.num_parts))
        self._model, self._plan, self._executor = model, plan, executor
        self._folders = folder, folder.with_name(f"{folder.name}.parts")
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)  # what an ingest that died left behind
            path.mkdir(parents=True)
        self._writer = VersionWriter(folder, version_slots(model, plan))
        self._parts = PartFiles(self._folders[1], begin.tensors, part_bytes)
        self._source: PartFiles | FolderSource = self._parts
        self._digests: dict[int, str] = {}
        self._lacking: dict[str, int] = {}
        self._tensors_of_part: dict[int, list[str]] = defaultdict(list)
        self._conversions: list[asyncio.Future[None]] = []

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
        """Convert each tensor once its last part is there."""
        for tensor in self.begin.tensors:
            parts = self._parts.parts_of(tensor.name)
            self._lacking[tensor.name] = len(parts)
            for part in parts:
                self._tensors_of_part[part].append(tensor.name)
            if not parts:
                self._convert(tensor.name)

    def convert_folder(self, source: FolderSource) -> None:
        """Convert all tensors of a folder in the background."""
        self._source = source
        for name in source.names:
            self._convert(name)

    def accept(self, part: int, digest: str, received: Path) -> None:
        """Take in a part whose size and digest were checked. The same part again changes nothing.

        Raises VersionConflict if other bytes came under the same number before.
        """
        known = self._digests.get(part)
        if known is not None and known != digest:
            raise VersionConflict(
                f"part {part} of version {self.begin.version} came with digest {known} before and {digest} now: "
                "DELETE the staged version to begin anew",
                {"part": part, "digests": [known, digest]},
            )
        if known is not None:
            received.unlink()
            return
        received.replace(self.part_path(part))
        self._digests[part] = digest
        self.missing.discard(part)
        for name in self._tensors_of_part[part]:
            self._lacking[name] -= 1
            if self._lacking[name] == 0:
                self._convert(name)

    async def finish(self) -> tuple[StoredTensor, ...]:
        """Wait for the conversions and sync. Raises UploadIncomplete, or what the first failed conversion raised."""
        if self.missing:
            raise UploadIncomplete(
                f"version {self.begin.version} lacks {len(self.missing)} of {self.num_parts} parts",
                {"missing_parts": sorted(self.missing)[:1000]},
            )
        await asyncio.gather(*self._conversions)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._finish)

    def failure(self) -> RolloutServiceError | None:
        """The error of the first conversion that failed, if one has."""
        done = (c.exception() for c in self._conversions if c.done() and not c.cancelled())
        return next((error for error in done if isinstance(error, RolloutServiceError)), None)

    async def discard(self) -> None:
        """Stop converting and remove the files."""
        for conversion in self._conversions:
            conversion.cancel()
        await asyncio.gather(*self._conversions, return_exceptions=True)
        self._writer.close()
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)

    def _convert(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self._conversions.append(loop.run_in_executor(self._executor, self._store, name))

    def _store(self, name: str) -> None:
        store(name, self._source.read(name), self._plan, self._writer)

    def _finish(self) -> tuple[StoredTensor, ...]:
        if self._model.tied and LM_HEAD in self._writer.unwritten:
            # a CPU engine packs its own copy of a tied head and never refreshes it from the embedding
            store(LM_HEAD, self._source.read(EMBEDDING), self._plan, self._writer)
        tensors = self._writer.finish()
        shutil.rmtree(self._folders[1])
        return tensors
