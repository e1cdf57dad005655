"""Stages a version of a log in memory on a GPU, and checks it there: no core of the host touches a byte.

A piece of the mapped files is copied to a passage, memory of the GPU beside the area. There its chunks are hashed, and
from there what the engine loads is copied to its place: what is loaded is a copy, within the GPU, of what was hashed,
and the way over PCIe has been checked with it. Nothing of it counts before all digests are those of the manifest. All
of that is queued, and a thread waits once, at the end. The kernels, of one warp a chunk, run beside the engine's own.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout_service.engine.loading.placement import Move, Placement
from rollout_service.gpu.streams import own_stream_of, queued_to_host
from rollout_service.runtime.threads import in_threads
from rollout_service.store.reading import Piece, VersionReader

if TYPE_CHECKING:
    from rollout_service.quant.digests import Hashing

PASSAGE_BYTES = 32 << 20
"""Of a file, that are copied, hashed and moved at once."""
PASSAGES = 4
"""One is copied to while others are hashed; each is one thread's. Taken with the area."""
_QUEUED_PIECES = 8
"""With one table of what is hashed. The first ones are copied while those that follow are looked up."""


def stage_on_device(
    reader: VersionReader,
    found: Iterable[Piece],
    placement: Placement,
    area: torch.Tensor,
    passages: Sequence[torch.Tensor],
) -> None:
    """Copy what ``placement`` has of these pieces to the area, and check all of their chunks.

    As ``copied_and_hashed``. Raises LogCorrupt naming tensor, chunk and file.
    """
    for batch, digests in copied_and_hashed(reader, found, placement, area, passages):
        reader.require([entry for piece in batch for entry in piece.chunks], digests)


def copied_and_hashed(
    reader: VersionReader,
    found: Iterable[Piece],
    placement: Placement,
    area: torch.Tensor,
    passages: Sequence[torch.Tensor],
) -> Iterator[tuple[list[Piece], bytes]]:
    """Copy what ``placement`` has of these pieces to the area, and say which digests the bytes have that it was copied
    from.

    Args:
        reader: has the files mapped.
        found: of at most as many bytes as a passage; asked for while those before are copied.
        area: uint8 [bytes].
        passages: uint8 [bytes], on the same device.

    Yields pieces that are copied, and the ``DIGEST_BYTES`` of each of their chunks, one after the other.
    """
    batches = _Batches(found)
    for hashed in in_threads(lambda passage: _stage(reader, batches, passage, placement, area), passages):
        yield from hashed


class _Batches:
    """Pieces that are queued together, for several threads: each takes the next ones."""

    def __init__(self, found: Iterable[Piece]) -> None:
        self._found = iter(found)
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[list[Piece]]:
        while batch := self._next():
            yield batch

    def _next(self) -> list[Piece]:
        with self._taking:
            return list(itertools.islice(self._found, _QUEUED_PIECES))


def _stage(
    reader: VersionReader,
    batches: Iterable[list[Piece]],
    passage: torch.Tensor,
    placement: Placement,
    area: torch.Tensor,
) -> list[tuple[list[Piece], bytes]]:
    with own_stream_of(area.device) as stream, _waited_for(stream):
        queued = [(batch, *_queue(reader, batch, passage, placement, area)) for batch in batches]
    return [(batch, hashing.read(short)) for batch, hashing, short in queued]


def _queue(
    reader: VersionReader, batch: list[Piece], passage: torch.Tensor, placement: Placement, area: torch.Tensor
) -> tuple["Hashing", Callable[[int], memoryview]]:
    """What says the digests of a batch once the stream has come so far, and the short chunks that it asks for."""
    from rollout_service.quant.digests import LEAST_BYTES, Hashing  # needs triton

    in_passage = np.array([passage.data_ptr(), 0], np.int64)
    hashing = Hashing([piece.runs + in_passage for piece in batch], area.device)
    short: dict[int, torch.Tensor] = {}
    """Copies of these chunks, by their numbers in the batch: the host hashes them, and the file may change."""
    first = 0
    for number, piece in enumerate(batch):
        source = torch.frombuffer(reader.view(piece), dtype=torch.uint8)
        passage[: piece.nbytes].copy_(source, non_blocking=True)
        hashing.queue(number)
        for move in placement.moves(piece):
            _move(move, passage, area)
        shorts = np.flatnonzero(piece.runs[:, 1] < LEAST_BYTES).tolist()
        short |= _short_chunks(piece, shorts, first, passage)
        first += len(piece.runs)
    hashing.collect()

    def bytes_of(number: int) -> memoryview:
        data: memoryview = short[number].numpy().data
        return data

    return hashing, bytes_of


def _short_chunks(piece: Piece, wanted: list[int], first: int, passage: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of a piece in its passage, these chunks in the host's memory, by their numbers from ``first`` on."""
    if not wanted:
        return {}
    starts, sizes = piece.runs[wanted].T.tolist()
    parts = [passage[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
    on_host = queued_to_host(torch.cat(parts)).split(sizes)
    return {first + at: part for at, part in zip(wanted, on_host, strict=True)}


def _move(move: Move, passage: torch.Tensor, area: torch.Tensor) -> None:
    target = area[move.target : move.target + move.rows * move.row_bytes]
    if move.rows == 1:
        target.copy_(passage[move.source : move.source + move.row_bytes], non_blocking=True)
        return
    rows = passage[move.source :].as_strided((move.rows, move.row_bytes), (move.stride_bytes, 1))
    target.view(move.rows, move.row_bytes).copy_(rows, non_blocking=True)


@contextmanager
def _waited_for(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Nothing is copied any more when this ends, however it does: the files may be unmapped then."""
    try:
        yield
    finally:
        if stream is not None:
            stream.synchronize()
