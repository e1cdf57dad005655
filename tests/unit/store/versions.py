"""Versions of two small tensors in a log, made without torch or a model."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.protocol.weight_log import Head
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.writer import VersionWriter

FIRST, SECOND = "first.weight", "second.weight"


def stage(log: WeightLog, version: int, fingerprint: str = "model", content: int | None = None) -> Manifest:
    """Complete files of a version in the staging folder, not committed; ``content`` makes others of the same number."""
    folder = log.staging(version)
    folder.mkdir(parents=True)
    slots = [
        TensorSlot(name=FIRST, dtype="float32", shape=(4, 5)),
        TensorSlot(name=SECOND, dtype="bfloat16", shape=(6,)),
    ]
    writer = VersionWriter(folder, Layout(slots))
    writer.write(FIRST, memoryview(bytes([(version if content is None else content) % 256]) * 80))
    writer.write(SECOND, memoryview(bytes(range(12))))
    return Manifest(version=version, fingerprint=fingerprint, recipe=Recipe(weights="none"), tensors=writer.finish())


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
