"""Writes versions as slime 624b824 and miles 31f1ca9 publish them, by the format that their pages document."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard

Weights = Mapping[str, torch.Tensor]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
CHECKSUMS: dict[str, Callable[[Any], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


class Change(NamedTuple):
    """What a version says of one tensor."""

    frame: bytes
    """Its changes, compressed."""
    checksum: str
    """The checksum of the changed tensor."""


def stepped(weights: Weights, number: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step, in which few elements change."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values():
        tensor.view(-1)[number :: 100 + number] += 0.25
    return found


def raw(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().copy()


def xor(old: Bytes, new: Bytes) -> Bytes:
    return old ^ new


def overwrite(old: Bytes, new: Bytes) -> Bytes:
    places = np.flatnonzero(old != new).astype("<u4")
    return np.concatenate([np.array([len(places)], "<u4").view(np.uint8), places.view(np.uint8), new[places]])


def change(old: Bytes, new: Bytes, encoding: str = "xor", checksum: str = "xxh3-128") -> Change:
    """Return one tensor's change."""
    encode = {"xor": xor, "overwrite": overwrite}[encoding]
    return Change(zstandard.ZstdCompressor(level=1).compress(encode(old, new).data), CHECKSUMS[checksum](new))


def publish(
    store: Path,
    version: int,
    old: Weights,
    new: Weights,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    files: int = 1,
    **metadata: object,
) -> Path:
    """Write the changes from version - 1 into ``weight_v…``; the options are those of ``write_version``."""
    names = [name for name in new if not torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8))]
    changes = {name: change(raw(old[name]), raw(new[name]), encoding, checksum) for name in names}
    return write_version(store, version, changes, encoding=encoding, checksum=checksum, files=files, **metadata)


def write_version(
    store: Path,
    version: int,
    changes: Mapping[str, Change],
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    files: int = 1,
    **metadata: object,
) -> Path:
    """Write a version's changes into ``weight_v…``; ``metadata`` replaces entries of the index."""
    folder = store / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    listed = dict[str, str]()
    for number in range(files if changes else 0):
        held = dict(list(changes.items())[number::files])
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        arrays = {name: np.frombuffer(each.frame, np.uint8) for name, each in held.items()}
        sums = {name: each.checksum for name, each in held.items()}
        safetensors.numpy.save_file(arrays, folder / file, metadata=sums)
        listed |= dict.fromkeys(held, file)
    said = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
        **metadata,
    }
    index = {"metadata": {name: value for name, value in said.items() if value is not None}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
