"""Read a version's files, and check the bytes in the memory into which they were read.

Checking a file that is read again afterwards would not cover the second reading: pages may be read again from the disk,
and the file may be written to.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt
import xxhash

from rollout_service.errors import LogCorrupt
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, Chunk, Manifest, StoredTensor
from rollout_service.store.mapped_files import MappedFiles, close_version_file, open_version_file


@dataclass(frozen=True, eq=False)
class Piece:
    """Contiguous chunks of a file that are read at once.

    Compared by identity: values derived from a piece are cached with it, for reading several versions with the same
    layout.
    """

    file: str
    offset: int
    """Offset in the file, in bytes."""
    nbytes: int
    chunks: tuple[tuple[StoredTensor, Chunk], ...]

    @cached_property
    def runs(self) -> npt.NDArray[np.int64]:
        """[chunks, 2]: offset in the piece and size in bytes of each chunk."""
        runs = [(tensor.offset + chunk.start - self.offset, chunk.nbytes) for tensor, chunk in self.chunks]
        return np.array(runs, np.int64).reshape(-1, 2)


def pieces(chunks: Iterable[tuple[StoredTensor, Chunk]], most_bytes: int) -> Iterator[Piece]:
    """Join chunks, in the order of their files, into pieces of up to ``most_bytes``; a larger one is a piece alone."""
    group: list[tuple[StoredTensor, Chunk]] = []
    file, offset, end = "", 0, 0
    for tensor, chunk in chunks:
        start = tensor.offset + chunk.start
        if group and (tensor.file != file or start != end or start + chunk.nbytes - offset > most_bytes):
            yield Piece(file, offset, end - offset, tuple(group))
            group = []
        if not group:
            file, offset = tensor.file, start
        group.append((tensor, chunk))
        end = start + chunk.nbytes
    if group:
        yield Piece(file, offset, end - offset, tuple(group))


class VersionReader:
    """The open files of one version. A context manager. Thread-safe.

    ``mapped``: maps the files, which this user must be able to write to, for ``view``. ``uploaded``: the files are
    those of an unfinished upload, which may still be written or given up; compare the bytes with a committed manifest
    before using them. Raises OSError if a file cannot be opened. Every method raises OSError, or LogCorrupt with
    tensor, chunk and file.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, mapped: MappedFiles | None = None, *, uploaded: bool = False
    ) -> None:
        self._version = manifest.version
        self._fds: dict[str, int] = {}
        self._mapped: dict[str, memoryview] = {}
        try:
            for file in manifest.places.files:
                self._fds[file] = open_version_file(folder / file, writable=mapped is not None, locked=not uploaded)
            if mapped is not None:
                self._mapped = {file: mapped.of(fd) for file, fd in self._fds.items()}
        except OSError:
            self.close()
            raise

    def read(self, piece: Piece, memory: memoryview) -> None:
        """Read a piece to the start of ``memory``, and check its chunks there."""
        memory = memory[: piece.nbytes]
        filled = read_at(self._fds[piece.file], piece.offset, memory)
        for tensor, chunk in piece.chunks:
            start = tensor.offset + chunk.start - piece.offset
            held = memory[start : min(start + chunk.nbytes, filled)]
            if xxhash.xxh3_128_digest(held) != chunk.digest:
                self._refuse(tensor, chunk, xxhash.xxh3_128_hexdigest(held), start + chunk.nbytes - filled)

    @property
    def is_mapped(self) -> bool:
        """Return True if ``view`` is available."""
        return bool(self._mapped)

    def view(self, piece: Piece) -> memoryview:
        """Return a piece of the mapped file: valid until ``close``, since the file is not written before.

        The bytes are unchecked: hash what is made of them, and call ``require``.
        """
        return self._mapped[piece.file][piece.offset : piece.offset + piece.nbytes]

    def view_of(self, tensor: StoredTensor) -> memoryview:
        """Return a tensor in the mapped file, with the same restrictions."""
        return self._mapped[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]

    def require(self, chunks: Sequence[tuple[StoredTensor, Chunk]], digests: bytes) -> None:
        """Raise LogCorrupt for the first of these chunks whose xxh3-128 differs from the manifest's.

        ``digests``: the digests of all chunks, ``DIGEST_BYTES`` each, concatenated.
        """
        if digests == b"".join(chunk.digest for _, chunk in chunks):
            return
        for number, (tensor, chunk) in enumerate(chunks):
            found = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if found != chunk.digest:
                self._refuse(tensor, chunk, found.hex(), 0)

    def copy_unchecked(self, tensor: StoredTensor, part: slice, memory: memoryview) -> None:
        """Copy a part of a tensor without a check; the caller checks the result."""
        start, nbytes = tensor.offset + part.start, part.stop - part.start
        if self._mapped:
            source = self._mapped[tensor.file][start : start + nbytes]
            np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(source, np.uint8))
        elif (filled := read_at(self._fds[tensor.file], start, memory[:nbytes])) < nbytes:
            raise LogCorrupt(
                f"version {self._version}: {tensor.file} ends {nbytes - filled} bytes early, in {tensor.name}",
                {"version": self._version, "tensor": tensor.name, "file": tensor.file},
            )

    def check(self, tensor: StoredTensor, buffer: memoryview) -> int:
        """Read a tensor piece by piece into ``buffer`` to check its digests; return its size in bytes."""
        for chunk in tensor.chunks():
            hasher, position = xxhash.xxh3_128(), 0
            while position < chunk.nbytes:
                held = buffer[: chunk.nbytes - position]
                filled = read_at(self._fds[tensor.file], tensor.offset + chunk.start + position, held)
                hasher.update(held[:filled])
                if filled < held.nbytes:
                    self._refuse(tensor, chunk, hasher.hexdigest(), held.nbytes - filled)
                position += filled
            if hasher.digest() != chunk.digest:
                self._refuse(tensor, chunk, hasher.hexdigest(), 0)
        return tensor.nbytes

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            close_version_file(fd)
        self._fds, self._mapped = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse(self, tensor: StoredTensor, chunk: Chunk, found: str, lacking: int) -> NoReturn:
        number, chunks = chunk.start // CHUNK_BYTES, max(1, -(-tensor.nbytes // CHUNK_BYTES))
        where = f"chunk {number} of {chunks} (bytes {chunk.start} to {chunk.start + chunk.nbytes})"
        ends = f"{tensor.file} ends {lacking} bytes early, and " if lacking > 0 else ""
        raise LogCorrupt(
            f"version {self._version}: {tensor.name} in {tensor.file}: {ends}{where} hashes to {found}, its manifest "
            f"says {chunk.digest.hex()}: push the weights again under a newer version",
            {"version": self._version, "tensor": tensor.name, "chunk": number, "file": tensor.file},
        )


def read_at(fd: int, offset: int, memory: memoryview) -> int:
    """Fill ``memory`` from a file. Return the number of bytes read, fewer at the end of the file. Raises OSError."""
    filled = 0
    while filled < memory.nbytes:
        count = os.preadv(fd, [memory[filled:]], offset + filled)
        if not count:
            break
        filled += count
    return filled
