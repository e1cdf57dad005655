"""Versions of two small tensors in a log, made without torch or a model."""

from rollout_service.types import PauseMode
from rollout_service.weights.log import Head, WeightLog
from rollout_service.weights.manifest import Manifest, Recipe
from rollout_service.weights.writer import TensorSlot, VersionWriter

FIRST, SECOND = "first.weight", "second.weight"


def stage(log: WeightLog, version: int, fingerprint: str = "model") -> Manifest:
    """Complete files of a version in the staging folder, not committed."""
    folder = log.staging(version)
    folder.mkdir(parents=True)
    slots = [
        TensorSlot(name=FIRST, dtype="float32", shape=(4, 5)),
        TensorSlot(name=SECOND, dtype="bfloat16", shape=(6,)),
    ]
    writer = VersionWriter(folder, slots)
    writer.write(FIRST, memoryview(bytes([version % 256]) * 80))
    writer.write(SECOND, memoryview(bytes(range(12))))
    return Manifest(version=version, fingerprint=fingerprint, recipe=Recipe(weights="none"), tensors=writer.finish())


def commit(log: WeightLog, version: int, mode: PauseMode = "keep", fingerprint: str = "model") -> Head:
    """A committed version."""
    return log.commit(stage(log, version, fingerprint), mode)


def flip_a_byte(log: WeightLog, version: int, name: str) -> None:
    """Damage one tensor of a committed version."""
    tensor = next(t for t in log.manifest(version).tensors if t.name == name)
    path = log.folder(version) / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + tensor.nbytes // 2] ^= 0x10
    path.write_bytes(data)
