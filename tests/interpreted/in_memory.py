"""Versions in a log in memory, which a kernel's results go to."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import Buffer

from rollout_service.protocol.tensors import TensorSlot
from rollout_service.protocol.upload import UploadTensor
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe, StoredTensor
from rollout_service.store.mapped_files import MappedFiles, Registered, SpareFiles
from rollout_service.store.writer import LogMemory, VersionWriter


def log_memory(root: Path, registered: Registered | None = None) -> LogMemory:
    """The memory of a log at ``root``, wherever that is. ``registered``: see ``MappedFiles``."""
    spare = SpareFiles(root)
    spare.begin()
    return LogMemory(MappedFiles(registered), spare)


def writer_in(folder: Path, layout: Layout) -> VersionWriter:
    """Make the folder of a version, and what writes it."""
    folder.mkdir()
    return VersionWriter(folder, layout, log_memory(folder))


class Upload:
    """A version that is on its way to a log in memory."""

    def __init__(self, log: WeightLog, version: int, slots: Sequence[TensorSlot], memory: LogMemory) -> None:
        self.version, self._log, self._folder = version, log, log.staging(version)
        self._folder.mkdir(parents=True)
        self._writer = VersionWriter(self._folder, Layout(slots), memory)

    def store(self, data: Mapping[str, Buffer]) -> None:
        """Fill the slots of these tensors with their bytes."""
        for name, held in data.items():
            self._writer.slot(name)[:] = held
            self._writer.filled(name)

    def commit(self) -> Manifest:
        """Commit the version. Return its manifest."""
        tensors = self._writer.finish()
        manifest = Manifest(version=self.version, fingerprint="model", recipe=Recipe(weights="none"), tensors=tensors)
        self._log.commit(manifest, "keep")
        return manifest

    def drop(self, *, is_killed: bool = False) -> None:
        """Remove its files, of an ingest that was killed as its successor does: nobody has ended the upload."""
        if not is_killed:
            self._writer.close()
        remove_tree(self._folder)


def assert_same_files(stored: Iterable[StoredTensor], folder: Path, expected: Path) -> None:
    """Compare the files of the same tensors in two folders byte for byte."""
    for file in {tensor.file for tensor in stored}:
        assert (folder / file).read_bytes() == (expected / file).read_bytes()


def table_of(tensors: Mapping[str, torch.Tensor]) -> tuple[UploadTensor, ...]:
    """What a trainer announces of its tensors."""
    return tuple(
        UploadTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
