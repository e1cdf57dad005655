"""Stage a version of a log in GPU memory and check it there, without work for the host's cores.

A piece of the mapped files is copied to a bounce buffer in GPU memory. Its chunks are hashed there, and
the loaded parts are copied from there to the staging buffer (``area``). The loaded bytes are therefore a copy, within
the GPU, of the hashed bytes, and the hash covers the PCIe transfer. The version counts as staged only if all digests
match the manifest. All work is queued, and a thread waits once, at the end. The hash kernels use one warp per chunk and
run concurrently with the engine's own.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout_service.engine.loading.placement import Move, Placement
from rollout_service.gpu.streams import own_stream_of, queue_to_host
from rollout_service.runtime.threads import in_threads
from rollout_service.store.reading import Piece, VersionReader

if TYPE_CHECKING:
    from rollout_service.quant.digests import Hashing

BOUNCE_BYTES = 32 << 20
"""Bytes of a file that are copied, hashed and moved together."""
BOUNCE_BUFFERS = 4
"""Number of bounce buffers, one per thread: one is filled while others are hashed. Allocated with the staging
buffer."""
_QUEUED_PIECES = 8
"""Number of pieces with one hash table. The first ones are copied while the others are looked up."""


def stage_on_device(
    reader: VersionReader,
    found: Iterable[Piece],
    placement: Placement,
    area: torch.Tensor,
    bounce_buffers: Sequence[torch.Tensor],
) -> None:
    """Copy the bytes of ``placement`` in these pieces to the staging buffer, and check all their chunks.

    Arguments as for ``copy_and_hash``. Raises LogCorrupt, which names tensor, chunk and file.
    """
    for batch, digests in copy_and_hash(reader, found, placement, area, bounce_buffers):
        reader.require([entry for piece in batch for entry in piece.chunks], digests)


def copy_and_hash(
    reader: VersionReader,
    found: Iterable[Piece],
    placement: Placement,
    area: torch.Tensor,
    bounce_buffers: Sequence[torch.Tensor],
) -> Iterator[tuple[list[Piece], bytes]]:
    """Copy the bytes of ``placement`` in these pieces to the staging buffer, and hash their source bytes.

    Yields copied pieces with the concatenated ``DIGEST_BYTES`` of their chunks.

    Args:
        reader: maps the files.
        found: pieces no larger than a bounce buffer, requested while earlier ones are copied.
        placement: the layout of the staging buffer.
        area: the staging buffer, uint8 [bytes].
        bounce_buffers: uint8 [bytes] each, on the same device.
    """
    batches = _Batches(found)
    for hashed in in_threads(
        lambda bounce_buffer: _stage(reader, batches, bounce_buffer, placement, area), bounce_buffers
    ):
        yield from hashed


class _Batches:
    """Batches of pieces for several threads; each thread takes the next batch."""

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
    bounce_buffer: torch.Tensor,
    placement: Placement,
    area: torch.Tensor,
) -> list[tuple[list[Piece], bytes]]:
    with own_stream_of(area.device) as stream, _wait_at_exit(stream):
        queued = [(batch, *_queue(reader, batch, bounce_buffer, placement, area)) for batch in batches]
    return [(batch, hashing.read(short)) for batch, hashing, short in queued]


def _queue(
    reader: VersionReader, batch: list[Piece], bounce_buffer: torch.Tensor, placement: Placement, area: torch.Tensor
) -> tuple["Hashing", Callable[[int], memoryview]]:
    """Queue a batch. Returns its hashing, and a function that returns the bytes of a short chunk for the host to
    hash."""
    from rollout_service.quant.digests import MIN_BYTES, Hashing  # imports triton

    in_bounce_buffer = np.array([bounce_buffer.data_ptr(), 0], np.int64)
    hashing = Hashing([piece.runs + in_bounce_buffer for piece in batch], area.device)
    short: dict[int, torch.Tensor] = {}
    """Copies of the short chunks by their index in the batch. The host hashes copies, because the file may change."""
    first = 0
    for number, piece in enumerate(batch):
        source = torch.frombuffer(reader.view(piece), dtype=torch.uint8)
        bounce_buffer[: piece.nbytes].copy_(source, non_blocking=True)
        hashing.queue(number)
        for move in placement.moves(piece):
            _move(move, bounce_buffer, area)
        shorts = np.flatnonzero(piece.runs[:, 1] < MIN_BYTES).tolist()
        short |= _short_chunks(piece, shorts, first, bounce_buffer)
        first += len(piece.runs)
    hashing.collect()

    def bytes_of(number: int) -> memoryview:
        data: memoryview = short[number].numpy().data
        return data

    return hashing, bytes_of


def _short_chunks(piece: Piece, wanted: list[int], first: int, bounce_buffer: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the ``wanted`` chunks of a piece in host memory, numbered from ``first``."""
    if not wanted:
        return {}
    starts, sizes = piece.runs[wanted].T.tolist()
    parts = [bounce_buffer[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
    on_host = queue_to_host(torch.cat(parts)).split(sizes)
    return {first + at: part for at, part in zip(wanted, on_host, strict=True)}


def _move(move: Move, bounce_buffer: torch.Tensor, area: torch.Tensor) -> None:
    target = area[move.target : move.target + move.rows * move.row_bytes]
    if move.rows == 1:
        target.copy_(bounce_buffer[move.source : move.source + move.row_bytes], non_blocking=True)
        return
    rows = bounce_buffer[move.source :].as_strided((move.rows, move.row_bytes), (move.stride_bytes, 1))
    target.view(move.rows, move.row_bytes).copy_(rows, non_blocking=True)


@contextmanager
def _wait_at_exit(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Wait for all copies at exit, even after an error, because the files may be unmapped then."""
    try:
        yield
    finally:
        if stream is not None:
            stream.synchronize()
