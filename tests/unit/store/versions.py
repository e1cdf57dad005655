"""Versions of two small tensors in a log, made without torch or a model."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.tensors import StoredDtype, TensorSlot
from rollout_service.protocol.weight_log import Head
from rollout_service.store.layout import MAX_FILE_BYTES, Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.writer import VersionWriter

FIRST, SECOND = "first.weight", "second.weight"


def written(
    folder: Path, tensors: Mapping[str, tuple[StoredDtype, tuple[int, ...], bytes]], version: int = 1,
    fingerprint: str = "model", max_file_bytes: int = MAX_FILE_BYTES,
) -> Manifest:  # fmt: skip
    """Complete files of a version in a folder, by name, dtype, shape and content of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    slots = [TensorSlot(name=name, dtype=dtype, shape=shape) for name, (dtype, shape, _) in tensors.items()]
    writer = VersionWriter(folder, Layout(slots, max_file_bytes))
    for name, (_, _, data) in tensors.items():
        writer.write(name, memoryview(data))
    return Manifest(version=version, fingerprint=fingerprint, recipe=Recipe(weights="none"), tensors=writer.finish())


def stage(log: WeightLog, version: int, fingerprint: str = "model", content: int | None = None) -> Manifest:
    """Complete files of a version in the staging folder, not committed; ``content`` makes others of the same number."""
    first = bytes([(version if content is None else content) % 256]) * 80
    tensors: dict[str, tuple[StoredDtype, tuple[int, ...], bytes]] = {
        FIRST: ("float32", (4, 5), first),
        SECOND: ("bfloat16", (6,), bytes(range(12))),
    }
    return written(log.staging(version), tensors, version, fingerprint)


def commit(
    log: WeightLog, version: int, mode: PauseMode = "keep", fingerprint: str = "model", content: int | None = None
) -> Head:
    """A committed version."""
    return log.commit(stage(log, version, fingerprint, content), mode)


@contextmanager
def restored(log: WeightLog) -> Iterator[None]:
    """What happens to the log inside is undone: it is as a backup kept it, and an ingest has started on that."""
    backup = log.root.with_name(f"{log.root.name}.backup")
    shutil.copytree(log.root, backup)
    yield
    shutil.rmtree(log.root)
    backup.rename(log.root)
    log.sign()


def flip_a_byte(log: WeightLog, version: int, name: str) -> None:
    """Damage one tensor of a committed version."""
    tensor = next(t for t in log.manifest(version).tensors if t.name == name)
    path = log.folder(version) / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + tensor.nbytes // 2] ^= 0x10
    path.write_bytes(data)
