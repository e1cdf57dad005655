"""Copies tensors of an upload to a staging area while the rest of it is still coming.

An upload to a log in memory says which of its tensors are stored (``store/upload_progress.py``). Pieces of which all
tensors are stored are copied and hashed as any other; once the version is committed their digests are compared with
its manifest, and only what differs or is lacking is read then. So nothing depends on the upload being what it said: a
tensor that was stored again, or an upload that was dropped and followed by another, costs time and no more.

The upload must have its tensors at the same places as the version before, which a trainer's have. Needs no torch.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate, chain, compress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout_service.engine.loading.placement import Placement
from rollout_service.store.log import uploads_folder
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, Manifest, StoredTensor
from rollout_service.store.reading import Piece, pieces
from rollout_service.store.upload_progress import TensorPlace, UploadToRead, places_digest

logger = logging.getLogger(__name__)

# Linux tells a process of new files, but not of bytes that another process writes into memory that both have mapped:
# it has to look. These take microseconds.
_LOOK_FOR_UPLOAD_S = 0.02
_LOOK_FOR_TENSORS_S = 0.002
_AT_ONCE = 16
"""Pieces, after which it may be stopped: 512 MiB take 10 ms over PCIe 5.0."""

Copies = Callable[[Iterable[Piece]], Iterator[tuple[list[Piece], bytes]]]
"""Copies pieces of an upload to the area, and tells the digests of their chunks: ``copied_and_hashed``."""


class ReadAhead:
    """One worker's, for the version that comes after one that it has loaded."""

    def __init__(self, loaded: Manifest, placement: Placement, most_bytes: int, *, every: bool) -> None:
        """
        Args:
            loaded: the version before.
            placement: what is copied of a version, and whereto.
            most_bytes: of a piece.
            every: hash all other bytes of the version, too.
        """
        self.placement = placement
        self._loaded, self._most_bytes, self._every = loaded, most_bytes, every
        self._places = _places_of(loaded)
        self._pieces = self._pieces_of(loaded)
        tensors = {tensor.name: number for number, tensor in enumerate(_in_order(loaded))}
        self._first = np.array([tensors[piece.chunks[0][0].name] for piece in self._pieces], np.int64)
        self._last = np.array([tensors[piece.chunks[-1][0].name] for piece in self._pieces], np.int64)
        """Tensors of each piece, by their places in the order of the files."""
        ends = np.cumsum([len(piece.chunks) for piece in self._pieces], dtype=np.int64).tolist()
        self._begins = [0, *ends[:-1]]
        """Of each piece, its first chunk among those of all pieces, which are these of all of the version's:"""
        first_chunk = dict(zip(tensors, accumulate(map(_num_chunks, _in_order(loaded)), initial=0), strict=False))
        self._chunks = np.array(
            [
                first_chunk[tensor.name] + chunk.start // CHUNK_BYTES
                for piece in self._pieces
                for tensor, chunk in piece.chunks
            ],
            np.int64,
        )
        self._is_read = np.zeros(len(self._pieces), np.bool_)
        self._digests = np.zeros((len(self._chunks), DIGEST_BYTES), np.uint8)
        self._stop = threading.Event()
        self.read_bytes = 0
        """Of the version that ``left_of`` was asked about, that need not be read again."""

    def run(self, root: Path, copying: Callable[[Path, Manifest, Placement], AbstractContextManager[Copies]]) -> None:
        """Read uploads to the log in ``root`` until one was read whole, or until ``stop``.

        ``copying``: gives what copies from the folder of an upload whose tensors lie as in this manifest. What was read
        of an upload that is dropped is forgotten when another one has begun. Raises OSError.
        """
        while not self._stop.is_set() and not self._is_read.all():
            with UploadToRead.newest(uploads_folder(root)) or nullcontext() as upload:
                if upload is not None and upload.places == self._places:
                    self._is_read[:] = False
                    with suppress(FileNotFoundError), copying(upload.folder, self._loaded, self.placement) as copies:
                        self._follow(upload, copies)
            self._stop.wait(_LOOK_FOR_UPLOAD_S)

    def stop(self) -> None:
        """Read nothing more: ``run`` returns after what it is copying."""
        self._stop.set()

    def left_of(self, manifest: Manifest) -> list[Piece]:
        """The pieces of a committed version whose bytes, as it has them, are not in the area. After ``run``."""
        self.read_bytes = 0
        if _places_of(manifest) != self._places:
            return self._pieces_of(manifest)
        committed = b"".join(tensor.digests_of_chunks() for tensor in _in_order(manifest))
        expected = np.frombuffer(committed, np.uint8).reshape(-1, DIGEST_BYTES)[self._chunks]
        is_same = (expected == self._digests).all(axis=1)
        is_there = self._is_read & np.logical_and.reduceat(is_same, self._begins)
        self.read_bytes = sum(piece.nbytes for piece in compress(self._pieces, is_there))
        if is_there.all():
            return []
        return list(compress(self._pieces_of(manifest), ~is_there))

    def _pieces_of(self, manifest: Manifest) -> list[Piece]:
        return list(pieces(self.placement.chunks(manifest, every=self._every), self._most_bytes))

    def _follow(self, upload: UploadToRead, copies: Copies) -> None:
        """Read what is stored of an upload, as it comes, until it is over."""
        numbers = {(piece.file, piece.offset): number for number, piece in enumerate(self._pieces)}
        while not self._stop.is_set() and not self._is_read.all():
            is_over = upload.is_over
            ready = self._ready(upload.stored())[:_AT_ONCE]
            if not ready and is_over:
                return
            if not ready:
                self._stop.wait(_LOOK_FOR_TENSORS_S)
            for batch, digests in copies([self._pieces[number] for number in ready]):
                found = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
                at = 0
                for piece in batch:
                    number = numbers[piece.file, piece.offset]
                    begin, count = self._begins[number], len(piece.chunks)
                    self._digests[begin : begin + count] = found[at : at + count]
                    self._is_read[number] = True
                    at += count

    def _ready(self, is_stored: npt.NDArray[np.bool_]) -> list[int]:
        """Pieces that are not read and of which every tensor is stored."""
        stored = np.concatenate([[0], np.cumsum(is_stored)])
        is_ready = stored[self._last + 1] - stored[self._first] == self._last + 1 - self._first
        return np.flatnonzero(is_ready & ~self._is_read).tolist()


def _in_order(manifest: Manifest) -> Iterator[StoredTensor]:
    """In the order of the files."""
    return chain.from_iterable(manifest.files().values())


def _places_of(manifest: Manifest) -> bytes:
    return places_digest(TensorPlace(t.name, t.dtype, t.shape, t.file, t.offset) for t in _in_order(manifest))


def _num_chunks(tensor: StoredTensor) -> int:
    return len(tensor.digests_of_chunks()) // DIGEST_BYTES
