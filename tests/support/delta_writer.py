"""Writes versions as slime 624b824 and miles 31f1ca9 publish them, by the format that their pages document."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard

Weights = Mapping[str, torch.Tensor]
CHECKSUMS = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def stepped(weights: Weights, number: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step, in which few elements change."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values():
        tensor.view(-1)[number :: 100 + number] += 0.25
    return found


def raw(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().copy()


def xor(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    return bytes((old ^ new).tobytes())


def overwrite(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    places = np.flatnonzero(old != new).astype("<u4")
    return np.uint32(len(places)).tobytes() + places.tobytes() + bytes(new[places].tobytes())


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
    """Write the changes from version - 1 into ``weight_v…``; ``metadata`` replaces entries of the index."""
    folder = store / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    encode = {"xor": xor, "overwrite": overwrite}[encoding]
    names = [name for name in new if not torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8))]
    listed = {}
    for number in range(files if names else 0):
        held = names[number::files]
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        frames = {
            name: zstandard.ZstdCompressor(level=1).compress(encode(raw(old[name]), raw(new[name]))) for name in held
        }
        sums = {name: CHECKSUMS[checksum](raw(new[name])) for name in held}
        arrays = {name: np.frombuffer(frame, np.uint8) for name, frame in frames.items()}
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
