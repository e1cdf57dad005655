"""Copies tensors of an upload to a staging area while the rest of it is still coming.

An upload to a log in memory says which of its tensors are stored (``store/upload_progress.py``). Pieces of which all
tensors are stored are copied and hashed as any other; once the version is committed their digests are compared with
its manifest, and only what differs or is lacking is read then. So nothing depends on the upload being what it said: a
tensor that was stored again, or an upload that was dropped and followed by another, costs time and no more.

The upload must have its tensors at the same places as the version before, which a trainer's have. Needs no torch.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import accumulate, compress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout_service.engine.loading.placement import Placement
from rollout_service.store.log import uploads_folder
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, Manifest
from rollout_service.store.reading import Piece, pieces
from rollout_service.store.upload_progress import UploadToRead

# Linux tells a process of new files, but not of bytes that another process writes into memory that both have mapped:
# it has to look. These take microseconds.
_LOOK_FOR_UPLOAD_S = 0.02
_LOOK_FOR_TENSORS_S = 0.002
_AT_ONCE = 64
"""Pieces, after which it may be stopped: 2 GiB take 40 ms over PCIe 5.0. Each time costs threads, a table and a wait,
beside an engine that has Python's lock most of the time."""

Copies = Callable[[Iterable[Piece]], Iterator[tuple[list[Piece], bytes]]]
"""Copies pieces of an upload to the area, and tells the digests of their chunks: ``copied_and_hashed``."""


class ReadAhead:
    """One worker's, for the version that comes after one that it has loaded."""

    def __init__(
        self,
        loaded: Manifest,
        placement: Placement,
        most_bytes: int,
        *,
        every: bool,
        before: "ReadAhead | None" = None,
    ) -> None:
        """Does nothing yet.

        Args:
            loaded: the version before.
            placement: what is copied of a version, and whereto.
            most_bytes: of a piece.
            every: hash all other bytes of the version, too.
            before: what read the version before, and will not be used any more.
        """
        self.placement = placement
        self._loaded, self._most_bytes, self._every = loaded, most_bytes, every
        self._stop = threading.Event()
        # one that had read nothing leaves what it was given itself
        self._before: ReadAhead | None = before if before is None or before._read is not None else before._before
        self._read: _PiecesRead | None = None
        self._places = b""
        self.read_bytes = 0
        """Of the version that ``left_of`` was asked about, that need not be read again."""

    @property
    def is_whole(self) -> bool:
        """Whether all of an upload was read."""
        return self._read is not None and bool(self._read.is_read.all())

    def run(self, root: Path, copying: Callable[[Path, Manifest, Placement], AbstractContextManager[Copies]]) -> None:
        """Read uploads to the log in ``root`` until one was read whole, or until ``stop``.

        ``copying``: gives what copies from the folder of an upload whose tensors lie as in this manifest. What was read
        of an upload that is dropped is forgotten when another one has begun. Raises OSError.
        """
        # nothing before there is an upload: the engine is being opened again by threads that need Python's lock
        while not self._stop.is_set() and not self.is_whole:
            with UploadToRead.newest(uploads_folder(root)) or nullcontext() as upload:
                if upload is not None and upload.places == self._prepared():
                    assert self._read is not None
                    self._read.is_read[:] = False
                    with suppress(FileNotFoundError), copying(upload.folder, self._loaded, self.placement) as copies:
                        self._follow(upload, copies, self._read)
            self._stop.wait(_LOOK_FOR_UPLOAD_S)

    def is_stopped(self) -> bool:
        """Return True once ``stop`` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Read nothing more: ``run`` returns after what it is copying."""
        self._stop.set()

    def left_of(self, manifest: Manifest) -> list[Piece]:
        """The pieces of a committed version whose bytes, as it has them, are not in the area. After ``run``."""
        self.read_bytes = 0
        read = self._read
        if read is None or manifest.places.digest != self._places:
            return self._pieces_of(manifest)
        digests = read.digests_in(manifest)
        if digests is None:  # an older release wrote the version
            return self._pieces_of(manifest)
        is_there = read.have(digests)
        self.read_bytes = sum(piece.nbytes for piece in compress(read.pieces, is_there))
        return [] if is_there.all() else list(read.pieces_of(manifest, digests, ~is_there))

    def _prepared(self) -> bytes:
        """The places at which an upload must have its tensors."""
        if self._read is not None:
            return self._places
        self._places = self._loaded.places.digest
        before, self._before = self._before, None
        if before is not None and before.placement is self.placement and before._places == self._places:
            self._read = before._read  # these take 15 ms of Python for an 8B, and a quarter of a second for a 30B-A3B
        self._read = self._read or _PiecesRead(self._pieces_of(self._loaded), self._loaded)
        self._read.is_read[:] = False
        return self._places

    def _pieces_of(self, manifest: Manifest) -> list[Piece]:
        return list(pieces(self.placement.chunks(manifest, every=self._every), self._most_bytes))

    def _follow(self, upload: UploadToRead, copies: Copies, read: "_PiecesRead") -> None:
        """Read what is stored of an upload, as it comes, until it is over."""
        while not self._stop.is_set() and not read.is_read.all():
            is_over = upload.is_over
            ready = read.ready(upload.stored())[:_AT_ONCE]
            if not ready and is_over:
                return
            if not ready:
                self._stop.wait(_LOOK_FOR_TENSORS_S)
            for batch, digests in copies(ready):
                read.note(batch, digests)


class _PiecesRead:
    """Which pieces of a version were read, and the digests that their chunks had."""

    def __init__(self, found: list[Piece], manifest: Manifest) -> None:
        """``found``: in the order of the files. ``manifest``: of a version with these pieces."""
        self.pieces = found
        self.is_read = np.zeros(len(found), np.bool_)
        self._numbers = {(piece.file, piece.offset): number for number, piece in enumerate(found)}
        order = [tensor.name for tensor in manifest.in_order()]
        tensors = dict(zip(order, range(len(order)), strict=True))
        self._first = np.array([tensors[piece.chunks[0][0].name] for piece in found], np.int64)
        self._last = np.array([tensors[piece.chunks[-1][0].name] for piece in found], np.int64)
        """Tensors of each piece, by their places in the order of the files."""
        self._begins = list(accumulate((len(piece.chunks) for piece in found[:-1]), initial=0))
        """Of each piece, its first chunk among those of all pieces."""
        self._lengths = [len(tensor.digests_of_chunks()) for tensor in manifest.in_order()]
        """Of the digests of each tensor."""
        counts = [length // DIGEST_BYTES for length in self._lengths]
        first_chunk = dict(zip(order, accumulate(counts[:-1], initial=0), strict=True))
        self._chunks = np.array(
            [first_chunk[t.name] + chunk.start // CHUNK_BYTES for piece in found for t, chunk in piece.chunks], np.int64
        )
        """Chunks of the pieces among all that the version has."""
        self._digests = np.zeros((len(self._chunks), DIGEST_BYTES), np.uint8)

    def ready(self, is_stored: npt.NDArray[np.bool_]) -> list[Piece]:
        """Those that are not read and of which every tensor is stored. ``is_stored``: [tensors]"""
        stored = np.concatenate([[0], np.cumsum(is_stored)])
        are_stored = stored[self._last + 1] - stored[self._first] == self._last + 1 - self._first
        return list(compress(self.pieces, are_stored & ~self.is_read))

    def note(self, batch: Iterable[Piece], digests: bytes) -> None:
        """These were read. ``digests``: of their chunks, one after the other."""
        found, at = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES), 0
        for piece in batch:
            number, count = self._numbers[piece.file, piece.offset], len(piece.chunks)
            self._digests[self._begins[number] : self._begins[number] + count] = found[at : at + count]
            self.is_read[number] = True
            at += count

    def digests_in(self, manifest: Manifest) -> npt.NDArray[np.uint8] | None:
        """Those that a version has of the chunks of the pieces; None if it has other chunks. [chunks, 16]

        ``manifest``: its tensors lie at the same places.
        """
        digests = [tensor.digests_of_chunks() for tensor in manifest.in_order()]
        if [len(each) for each in digests] != self._lengths:
            return None
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)[self._chunks]

    def have(self, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Of each piece, whether it was read and had the digests that ``digests_in`` says. [pieces]"""
        is_same = (digests == self._digests).all(axis=1)
        return self.is_read & np.logical_and.reduceat(is_same, self._begins)

    def pieces_of(
        self, manifest: Manifest, digests: npt.NDArray[np.uint8], which: npt.NDArray[np.bool_]
    ) -> Iterator[Piece]:
        """Some pieces of a version. ``digests``: as ``digests_in`` says. ``which``: [pieces]"""
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        for number in np.flatnonzero(which):
            piece, begin = self.pieces[number], self._begins[number]
            chunks = (
                (tensors[tensor.name], chunk._replace(digest=digests[begin + count].tobytes()))
                for count, (tensor, chunk) in enumerate(piece.chunks)
            )
            yield replace(piece, chunks=tuple(chunks))
