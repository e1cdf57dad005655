"""Copy an upload's tensors to a staging buffer before the upload is complete.

An upload to an in-memory log publishes which tensors are stored (``store/upload_progress.py``). Pieces whose tensors
are all stored are copied and hashed as usual. After the commit, their digests are compared with the manifest, and only
changed or missing pieces are read. Correctness therefore does not depend on the upload's claims. A tensor that was
stored again, or a dropped upload, only costs time.

The upload must have its tensors at the same offsets as the previous version, as a trainer's uploads do. Needs no torch.
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

# Linux notifies a process of new files, but not of bytes that another process writes into shared mappings. These
# therefore need polling, which takes microseconds.
_LOOK_FOR_UPLOAD_S = 0.02
_LOOK_FOR_TENSORS_S = 0.002
_AT_ONCE = 64
"""Maximum number of pieces between two checks for a stop: 2 GiB, which take 40 ms over PCIe 5.0. Each batch costs
threads, a hash table and a wait, while the engine holds the GIL most of the time."""

CopyPieces = Callable[[Iterable[Piece]], Iterator[tuple[list[Piece], bytes]]]
"""Copies pieces of an upload to the staging buffer, and yields the digests of their chunks, like
``copy_and_hash``."""


class ReadAhead:
    """Reads the upload of the version after a loaded one, for one worker."""

    def __init__(
        self,
        loaded: Manifest,
        placement: Placement,
        most_bytes: int,
        *,
        every: bool,
        before: "ReadAhead | None" = None,
    ) -> None:
        """Prepare the reader without reading.

        Args:
            loaded: the manifest of the previous version.
            placement: the layout of the staging buffer.
            most_bytes: maximum size of a piece.
            every: True to hash all other bytes of the version, too.
            before: the reader of the previous version, which is no longer used.
        """
        self.placement = placement
        self._loaded, self._most_bytes, self._every = loaded, most_bytes, every
        self._stop = threading.Event()
        # a reader that has read nothing passes on its own predecessor
        self._before: ReadAhead | None = before if before is None or before._read is not None else before._before
        self._read: _PiecesRead | None = None
        self._places = b""
        self.read_bytes = 0
        """Bytes of the last version given to ``remaining_pieces`` that need not be read again."""

    @property
    def is_whole(self) -> bool:
        """True if a whole upload was read."""
        return self._read is not None and bool(self._read.is_read.all())

    def run(
        self, root: Path, open_copies: Callable[[Path, Manifest, Placement], AbstractContextManager[CopyPieces]]
    ) -> None:
        """Read uploads to the log in ``root`` until one was read completely, or until ``stop``.

        Data of a dropped upload is discarded when another one begins. Raises OSError.

        ``open_copies``: returns the copier for an upload's folder whose tensors have the offsets of the given manifest.
        """
        # nothing is prepared before an upload exists: threads that reopen the engine need the GIL
        while not self._stop.is_set() and not self.is_whole:
            with UploadToRead.newest(uploads_folder(root)) or nullcontext() as upload:
                if upload is not None and upload.places == self._prepare():
                    assert self._read is not None
                    self._read.is_read[:] = False
                    with (
                        suppress(FileNotFoundError),
                        open_copies(upload.folder, self._loaded, self.placement) as copies,
                    ):
                        self._follow(upload, copies, self._read)
            self._stop.wait(_LOOK_FOR_UPLOAD_S)

    def is_stopped(self) -> bool:
        """Return True after a call of ``stop``."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Stop reading. ``run`` returns after its current copies."""
        self._stop.set()

    def remaining_pieces(self, manifest: Manifest) -> list[Piece]:
        """Return the pieces of a committed version whose bytes are not in the staging buffer. Call it after ``run``."""
        self.read_bytes = 0
        read = self._read
        if read is None or manifest.places.digest != self._places:
            return self._pieces_of(manifest)
        digests = read.digests_in(manifest)
        is_there = read.have(digests)
        self.read_bytes = sum(piece.nbytes for piece in compress(read.pieces, is_there))
        return [] if is_there.all() else list(read.pieces_of(manifest, digests, ~is_there))

    def _prepare(self) -> bytes:
        """Return the digest of the tensor offsets that an upload must have."""
        if self._read is not None:
            return self._places
        self._places = self._loaded.places.digest
        before, self._before = self._before, None
        if before is not None and before.placement is self.placement and before._places == self._places:
            # creating it takes 15 ms of Python for an 8B, and a quarter of a second for a 30B-A3B
            self._read = before._read
        self._read = self._read or _PiecesRead(self._pieces_of(self._loaded), self._loaded)
        self._read.is_read[:] = False
        return self._places

    def _pieces_of(self, manifest: Manifest) -> list[Piece]:
        return list(pieces(self.placement.chunks(manifest, every=self._every), self._most_bytes))

    def _follow(self, upload: UploadToRead, copies: CopyPieces, read: "_PiecesRead") -> None:
        """Read the stored tensors of an upload as they arrive, until it is complete."""
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
    """The pieces of a version that were read, with the digests of their chunks."""

    def __init__(self, found: list[Piece], manifest: Manifest) -> None:
        """Prepare the record. ``found``: the pieces in file order. ``manifest``: of a version with these pieces."""
        self.pieces = found
        self.is_read = np.zeros(len(found), np.bool_)
        self._numbers = {(piece.file, piece.offset): number for number, piece in enumerate(found)}
        order = [tensor.name for tensor in manifest.in_order()]
        tensors = dict(zip(order, range(len(order)), strict=True))
        self._first = np.array([tensors[piece.chunks[0][0].name] for piece in found], np.int64)
        self._last = np.array([tensors[piece.chunks[-1][0].name] for piece in found], np.int64)
        """First and last tensor of each piece, as indices in file order."""
        self._begins = list(accumulate((len(piece.chunks) for piece in found[:-1]), initial=0))
        """Index of each piece's first chunk among the chunks of all pieces."""
        counts = [len(tensor.digests_of_chunks()) // DIGEST_BYTES for tensor in manifest.in_order()]
        first_chunk = dict(zip(order, accumulate(counts[:-1], initial=0), strict=True))
        self._chunks = np.array(
            [first_chunk[t.name] + chunk.start // CHUNK_BYTES for piece in found for t, chunk in piece.chunks], np.int64
        )
        """Indices of the pieces' chunks among all chunks of the version."""
        self._digests = np.zeros((len(self._chunks), DIGEST_BYTES), np.uint8)

    def ready(self, is_stored: npt.NDArray[np.bool_]) -> list[Piece]:
        """Return the unread pieces whose tensors are all stored. ``is_stored``: bool [tensors]."""
        stored = np.concatenate([[0], np.cumsum(is_stored)])
        are_stored = stored[self._last + 1] - stored[self._first] == self._last + 1 - self._first
        return list(compress(self.pieces, are_stored & ~self.is_read))

    def note(self, batch: Iterable[Piece], digests: bytes) -> None:
        """Mark pieces as read. ``digests``: the concatenated digests of their chunks."""
        found, at = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES), 0
        for piece in batch:
            number, count = self._numbers[piece.file, piece.offset], len(piece.chunks)
            self._digests[self._begins[number] : self._begins[number] + count] = found[at : at + count]
            self.is_read[number] = True
            at += count

    def digests_in(self, manifest: Manifest) -> npt.NDArray[np.uint8]:
        """Return a version's digests of the pieces' chunks, uint8 [chunks, 16].

        ``manifest``: its tensors must have the same offsets.
        """
        digests = [tensor.digests_of_chunks() for tensor in manifest.in_order()]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)[self._chunks]

    def have(self, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return for each piece True if it was read with the digests of ``digests_in``, bool [pieces]."""
        is_same = (digests == self._digests).all(axis=1)
        return self.is_read & np.logical_and.reduceat(is_same, self._begins)

    def pieces_of(
        self, manifest: Manifest, digests: npt.NDArray[np.uint8], which: npt.NDArray[np.bool_]
    ) -> Iterator[Piece]:
        """Yield the selected pieces of a version. ``digests``: the result of ``digests_in``. ``which``: bool
        [pieces]."""
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        for number in np.flatnonzero(which):
            piece, begin = self.pieces[number], self._begins[number]
            chunks = (
                (tensors[tensor.name], chunk._replace(digest=digests[begin + count].tobytes()))
                for count, (tensor, chunk) in enumerate(piece.chunks)
            )
            yield replace(piece, chunks=tuple(chunks))
