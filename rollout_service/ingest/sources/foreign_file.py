"""A safetensors file that another process may change. It is read, never mapped, and checked for changes at each read.

The trainer may save its next checkpoint into the same folder at any moment. If a mapped file shrinks, the process is
killed (SIGBUS). If a file is rewritten in place, two versions would be mixed.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from rollout_service.errors import InvalidManifest
from rollout_service.protocol.ignored import NOTHING_IGNORED, IgnoredTensors
from rollout_service.protocol.upload import DTYPE_BYTES, SourceDtype
from rollout_service.store.reading import read_at

_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_DTYPES: dict[str, SourceDtype] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
}


class SourceTensor(NamedTuple):
    """One entry of a header."""

    dtype: SourceDtype
    shape: tuple[int, ...]
    offset: int
    """Offset in the file, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Header(NamedTuple):
    """The header of a safetensors file."""

    entries: list[tuple[str, str, tuple[int, ...], int]]
    """Names, dtypes, shapes and offsets in the file of all tensors, in the order of their bytes."""
    metadata: dict[str, str]
    """The texts under ``__metadata__``."""
    stat: os.stat_result

    @classmethod
    def of(cls, path: Path) -> "Header":
        """Read the header of a file. Raises InvalidManifest for a file that is not safetensors or cannot be read."""
        try:
            with _opened(path) as fd:
                stat = os.fstat(fd)
                header = _header(fd, stat.st_size)
                entries = _entries(header, stat.st_size)
        except (SafetensorError, OSError) as error:
            raise InvalidManifest(f"{path} is not a safetensors file: {error}") from error
        return cls(entries, json.loads(header[8:]).get("__metadata__") or {}, stat)


class SourceFile:
    """A safetensors file. Its header is read at construction.

    Raises InvalidManifest for a file that is not safetensors, cannot be read, or holds an unsupported dtype.
    """

    def __init__(self, path: Path, ignored: IgnoredTensors = NOTHING_IGNORED) -> None:
        """``ignored``: tensors that are left out, whatever their dtype."""
        self.path = path
        self.ignored: list[str] = []
        """Names of the tensors that are left out."""
        self.tensors: dict[str, SourceTensor] = {}
        """Tensors by name, in the order of their bytes."""
        header = Header.of(path)
        self._stat = header.stat
        for name, dtype, shape, offset in header.entries:
            if name in ignored:
                self.ignored.append(name)
            else:
                self.tensors[name] = SourceTensor(self._known(name, dtype), shape, offset)

    def _known(self, name: str, dtype: str) -> SourceDtype:
        if dtype not in _DTYPES:
            raise InvalidManifest(
                f"{name} in {self.path.name} is {dtype}; the ingest takes {', '.join(_DTYPES)} and quantizes itself",
                {"tensor": name, "dtype": dtype},
            )
        return _DTYPES[dtype]

    @contextmanager
    def reading(self) -> Iterator["SourceReader"]:
        """Open the file for reading tensors. Raises OSError."""
        with _opened(self.path) as fd:
            yield SourceReader(fd, self, self._stat)


class SourceReader:
    """An open safetensors file."""

    def __init__(self, fd: int, file: SourceFile, before: os.stat_result) -> None:
        self._fd, self._file, self._before = fd, file, before

    def read(self, name: str, room: memoryview, start: int = 0) -> None:
        """Fill ``room`` with the tensor's bytes from ``start`` on. Raises InvalidManifest if the file was changed, or
        OSError."""
        done = read_at(self._fd, self._file.tensors[name].offset + start, room)
        now = os.fstat(self._fd)  # after reading, so that a write before or during the read is detected
        if done < room.nbytes or _identity(now) != _identity(self._before):
            raise InvalidManifest(
                f"{name} was to be read from {self._file.path}, which has changed since its version was begun: "
                f"{self._before.st_size} bytes, modified at {self._before.st_mtime:.3f}, and {now.st_size} bytes, "
                f"modified at {now.st_mtime:.3f} now; leave the files of a source alone until its version is committed",
                {"tensor": name, "file": str(self._file.path)},
            )


def _identity(stat: os.stat_result) -> tuple[int, int, int, int, int]:
    # also compare ctime, because tools can set mtime
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _header(fd: int, file_bytes: int) -> bytes:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(_MOST_HEADER_BYTES, file_bytes - 8):
        raise SafetensorError(f"a header of {length} bytes in a file of {file_bytes}")
    header = os.pread(fd, 8 + length, 0)
    if len(header) < 8 + length:
        raise SafetensorError(f"only {len(header)} of the {8 + length} bytes of its header could be read")
    return header


def _entries(header: bytes, file_bytes: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return names, dtypes, shapes and offsets of all tensors, in the order of their bytes.

    The library maps the file that it opens. It therefore gets a copy with this header, and zeros in place of the data.
    """
    memory = os.memfd_create("safetensors-header")
    try:
        os.pwrite(memory, header, 0)
        os.ftruncate(memory, file_bytes)
        with safe_open(f"/proc/self/fd/{memory}", framework="pt") as reader:
            slices = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
            places = json.loads(header[8:])  # the library has validated it
            return [
                (name, entry.get_dtype(), tuple(entry.get_shape()), len(header) + places[name]["data_offsets"][0])
                for name, entry in slices
            ]
    finally:
        os.close(memory)
