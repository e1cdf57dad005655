"""A folder of changes, as slime, miles, Stitch and ModelExpress publish a version.

    model.safetensors.index.json   {"metadata": {"version", "base_version", "delta_encoding", "compression_format",
                                   "checksum_format"}, "weight_map": {tensor: file}}
    *.safetensors                  the changed tensors: a zstd frame each, as uint8
    __metadata__ of these files    the checksum of each tensor after the change

``xor``: the frame holds as many bytes as the tensor, old XOR new. ``overwrite``: the number of changed bytes as uint32,
their positions as uint32, and their new values. A folder whose index has no ``delta_encoding`` holds whole tensors.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from blake3 import blake3

from rollout_service.errors import InvalidDelta, InvalidManifest
from rollout_service.ingest.sources.folder import Header, allowed_path
from rollout_service.model.weight_files import INDEX_FILE, distinct_files
from rollout_service.runtime.threads import stretches
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.reading import read_at

_PIECE_BYTES = 2 << 20
"""Bytes that are read, decoded, changed and hashed before the next ones. They stay in a core's cache; threads that work
on smaller pieces wait for the GIL (16 of them: 8.3 GB/s with 512 KiB, 14.6 with 2 MiB)."""
_MAX_INDEX_BYTES = 64 << 20

Bytes = npt.NDArray[np.uint8]
Fill = Callable[[slice], None]
"""Reads bytes of the tensor before the change into their place."""


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: memoryview) -> None:
        self._sum = zlib.adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


def _xor(packed: memoryview, tensor: Bytes, fill: Fill, hasher: _Hasher) -> None:
    """Apply the changes ``packed`` to all bytes of a tensor. Raises ValueError or ZstdError."""
    piece = np.empty(min(_PIECE_BYTES, tensor.size), np.uint8)
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        for place in stretches(tensor.size, _PIECE_BYTES):
            wanted = piece[: place.stop - place.start]
            filled = 0
            while filled < wanted.size and (count := reader.readinto(wanted[filled:].data)):
                filled += count
            if filled < wanted.size:
                raise ValueError(f"it has {place.start + filled} bytes of changes for the tensor's {tensor.size}")
            fill(place)
            np.bitwise_xor(tensor[place], wanted, out=tensor[place])
            hasher.update(tensor[place].data)
        if reader.read(1):
            raise ValueError(f"it has more bytes of changes than the tensor's {tensor.size}")


def _overwrite(packed: memoryview, tensor: Bytes, fill: Fill, hasher: _Hasher) -> None:
    """Write the bytes in ``packed`` to their positions. Raises ValueError or ZstdError."""
    limit = 4 + 5 * tensor.size
    # the decoder allocates what the frame announces
    if (announced := zstandard.frame_content_size(packed)) > limit:
        raise ValueError(f"it announces {announced} bytes of changes for the tensor's {tensor.size}")
    data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=limit)
    count = int.from_bytes(data[:4], "little")
    if len(data) != 4 + 5 * count:
        raise ValueError(f"it has {len(data)} bytes for {count} changed ones")
    positions = np.frombuffer(data, "<u4", count, 4)
    if count and int(positions.max()) >= tensor.size:
        raise ValueError(f"it changes byte {positions.max()} of the tensor's {tensor.size}")
    fill(slice(0, tensor.size))
    tensor[positions] = np.frombuffer(data, np.uint8, count, 4 + 4 * count)
    hasher.update(tensor.data)


_ENCODINGS: dict[str, Callable[[memoryview, Bytes, Fill, _Hasher], None]] = {"xor": _xor, "overwrite": _overwrite}
_CHECKSUMS: dict[str, Callable[[], _Hasher]] = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3, "adler32": _Adler32}


class _Change(NamedTuple):
    file: Path
    offset: int
    nbytes: int
    checksum: str


def version_name(text: object) -> str:
    """Return a version as it is compared: ``7`` for ``000007`` and 7."""
    name = str(text)
    return str(int(name)) if name.isascii() and name.isdecimal() else name


def index_of(folder: Path) -> dict[str, Any] | None:
    """Return the index of a folder; None: it has none. Raises InvalidManifest."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_INDEX_BYTES:
                raise InvalidManifest(f"{path} has {size} bytes, and an index at most {_MAX_INDEX_BYTES}")
            index = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidManifest(f"{path} cannot be read: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("metadata", {}), dict):
        raise InvalidManifest(f"{path} is no index of safetensors: write metadata and a weight_map")
    return index


def is_delta(folder: Path) -> bool:
    """Return True if a folder holds changes. Raises InvalidManifest."""
    index = index_of(folder)
    return index is not None and "delta_encoding" in index.get("metadata", {})


def kv_scales_of(folder: Path) -> dict[str, float] | None:
    """Return the KV scales of a version that another service has published. Raises InvalidManifest."""
    scales = (index_of(folder) or {}).get("metadata", {}).get("kv_scales")
    if scales is None:
        return None
    if not isinstance(scales, dict) or not all(isinstance(scale, float) for scale in scales.values()):
        raise InvalidManifest(f"{folder / INDEX_FILE} has kv_scales that are no numbers by name: publish it again")
    return scales


def whole_check(folder: Path, files: Iterable[Path]) -> Callable[[str, memoryview], None] | None:
    """Return a function that compares a tensor of a whole folder with its checksum; None: the index announces none.

    ModelExpress writes them into the files' ``__metadata__``, and ``publisher.py`` into the index. Raises
    InvalidManifest, also from the function.
    """
    said = (index_of(folder) or {}).get("metadata", {})
    if "checksum_format" not in said:
        return None
    new_hasher = _CHECKSUMS[_known(folder, "checksum_format", said, tuple(_CHECKSUMS))]
    sums = said.get("checksums")
    if not isinstance(sums, dict):
        sums = {name: text for file in files for name, text in Header.of(file).metadata.items()}

    def check(name: str, room: memoryview) -> None:
        hasher = new_hasher()
        hasher.update(room)
        if (found := hasher.hexdigest()) != sums.get(name):
            raise InvalidManifest(
                f"{name} in {folder} has the checksum {found}, and not {sums.get(name)}: publish it again"
            )

    return check


def _known(folder: Path, field: str, said: Mapping[str, object], known: tuple[str, ...]) -> str:
    value = said.get(field)
    if value not in known:
        raise InvalidManifest(
            f"version {version_name(said.get('version', ''))} in {folder} has {field} {value!r}: the service reads "
            f"{', '.join(known)}",
            {"version": said.get("version"), field: value},
        )
    return str(value)


class DeltaFolder:
    """The changes of one version. Raises InvalidManifest or InvalidDelta for an unusable folder."""

    def __init__(self, folder: Path, roots: tuple[Path, ...] | None = None) -> None:
        """``roots``: folders that must contain its files once links are resolved, or Forbidden is raised; None:
        anywhere."""
        self.folder, self._roots = folder, roots
        index = index_of(folder)
        if index is None:
            raise InvalidManifest(f"{folder} has no {INDEX_FILE}, which a delta needs")
        said: dict[str, object] = index["metadata"]
        missing = [name for name in ("version", "base_version", "checksum_format") if name not in said]
        if missing:
            raise InvalidManifest(f"{folder / INDEX_FILE} has no metadata.{missing[0]}, which a delta needs")
        self.version, self.base = version_name(said["version"]), version_name(said["base_version"])
        if self.version == self.base or (
            self.version.isdecimal() and self.base.isdecimal() and int(self.version) < int(self.base)
        ):
            raise InvalidDelta(f"{folder} is version {self.version}, and cannot be a delta of version {self.base}")
        self._apply = _ENCODINGS[_known(folder, "delta_encoding", said, tuple(_ENCODINGS))]
        _known(folder, "compression_format", said, ("zstd",))
        self._new_hasher = _CHECKSUMS[_known(folder, "checksum_format", said, tuple(_CHECKSUMS))]
        self._changes = dict(self._read(index))
        content = [said, sorted((name, change.checksum) for name, change in self._changes.items())]
        self.stamp = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
        """Hash of the metadata and of all checksums."""

    @property
    def names(self) -> KeysView[str]:
        """Return the names of the changed tensors."""
        return self._changes.keys()

    def apply(self, name: str, room: memoryview, fill: Fill) -> None:
        """Fill ``room`` with the bytes of a changed tensor, change them, and compare their checksum.

        Raises InvalidDelta, after which ``room`` holds garbage, or OSError.
        """
        change = self._changes[name]
        packed = memoryview(bytearray(change.nbytes))
        fd = os.open(change.file, os.O_RDONLY)
        try:
            if read_at(fd, change.offset, packed) < change.nbytes:
                raise self._invalid(name, f"{change.file.name} has become shorter")
        finally:
            os.close(fd)
        try:
            hasher = self._new_hasher()
            self._apply(packed, np.ndarray((room.nbytes,), np.uint8, room), fill, hasher)
        except (ValueError, zstandard.ZstdError) as error:
            raise self._invalid(name, str(error)) from error
        if (found := hasher.hexdigest()) != change.checksum:
            raise self._invalid(
                name,
                f"the changed tensor has the checksum {found}, and not {change.checksum}: the delta is damaged, or was "
                "made from other weights",
            )

    def copy_to(self, folder: Path) -> None:
        """Replace ``folder`` by a copy of this one. Raises OSError."""
        remove_tree(folder)
        folder.mkdir(parents=True)
        for path in {self.folder / INDEX_FILE, *(change.file for change in self._changes.values())}:
            target = folder / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _invalid(self, name: str, why: str) -> InvalidDelta:
        return InvalidDelta(
            f"version {self.version} in {self.folder}, a delta of version {self.base}: {name}: {why}; publish it "
            "again, or a whole folder",
            {"version": self.version, "base_version": self.base, "tensor": name},
        )

    def _read(self, index: dict[str, Any]) -> Iterator[tuple[str, _Change]]:
        listed = index.get("weight_map")
        if not isinstance(listed, dict):
            raise InvalidManifest(f"{self.folder / INDEX_FILE} has no weight_map")
        try:
            files = distinct_files(listed.values()) if listed else []
        except ValueError as error:
            raise InvalidManifest(f"{self.folder}: {error}") from error
        found: dict[str, Path] = {}
        for path in (self.folder / file for file in files):
            if self._roots is not None:
                allowed_path(path, self._roots)
            header = Header.of(path)
            for name, _, _, offset, nbytes in header.entries:
                if name in found:  # XOR twice would undo the change
                    raise InvalidManifest(f"{name} is in {found[name]} and in {path}: write each tensor once")
                if name not in header.metadata:
                    raise InvalidManifest(f"{path} has no checksum of {name}: write it into the file's __metadata__")
                found[name] = path
                yield name, _Change(path, offset, nbytes, header.metadata[name])
        if lost := sorted(listed.keys() - found.keys()):
            raise InvalidManifest(f"{self.folder / INDEX_FILE} names {lost[0]}, which no file holds")


def fill_changed(name: str, room: memoryview, fill: Fill, links: Sequence[DeltaFolder]) -> None:
    """Fill ``room`` with the bytes of a tensor, and apply the changes of ``links``, oldest first.

    Raises the errors of ``DeltaFolder.apply``.
    """
    changing = [link for link in links if name in link.names]
    if not changing:
        fill(slice(0, room.nbytes))
    for link in changing:
        link.apply(name, room, fill)
        fill = is_filled


def is_filled(_: slice) -> None:
    """Read nothing: the tensor is there already."""
