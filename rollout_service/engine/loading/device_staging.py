"""Stage a version of a log in GPU memory and check it there, without work for the host's cores.

A piece of the mapped files is copied to a bounce buffer in GPU memory. Its chunks are hashed there, and
the loaded parts are copied from there to the staging buffer (``area``). The loaded bytes are therefore a copy, within
the GPU, of the hashed bytes, and the hash covers the PCIe transfer. The version counts as staged only if all digests
match the manifest. All work is queued, and a thread waits once, at the end. The hash kernels use one warp per chunk and
run concurrently with the engine's own.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
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
    remaining, taking = iter(found), threading.Lock()

    def next_batch() -> list[Piece]:
        with taking:
            return list(itertools.islice(remaining, _QUEUED_PIECES))

    def stage(bounce_buffer: torch.Tensor) -> list[tuple[list[Piece], bytes]]:
        queued = []
        with own_stream_of(area.device) as stream:
            try:
                while batch := next_batch():
                    queued.append((batch, *_queue(reader, batch, bounce_buffer, placement, area)))
            finally:
                if stream is not None:
                    stream.synchronize()  # also after an error, because the files may be unmapped then
        return [(batch, hashing.read(short.__getitem__)) for batch, hashing, short in queued]

    for hashed in in_threads(stage, bounce_buffers):
        yield from hashed


def _queue(
    reader: VersionReader, batch: list[Piece], bounce_buffer: torch.Tensor, placement: Placement, area: torch.Tensor
) -> tuple["Hashing", dict[int, memoryview]]:
    """Queue a batch. Return its hashing, and the memory of copies of the short chunks by their index in the batch.

    The host hashes the copies, because the file may change.
    """
    from rollout_service.quant.digests import MIN_BYTES, Hashing  # imports triton

    in_bounce_buffer = np.array([bounce_buffer.data_ptr(), 0], np.int64)
    hashing = Hashing([piece.runs + in_bounce_buffer for piece in batch], area.device)
    short: dict[int, memoryview] = {}
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
    return hashing, short


def _short_chunks(piece: Piece, wanted: list[int], first: int, bounce_buffer: torch.Tensor) -> dict[int, memoryview]:
    """Return the ``wanted`` chunks of a piece in host memory, numbered from ``first``."""
    if not wanted:
        return {}
    starts, sizes = piece.runs[wanted].T.tolist()
    parts = [bounce_buffer[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
    on_host = queue_to_host(torch.cat(parts)).split(sizes)
    return {first + at: part.numpy().data for at, part in zip(wanted, on_host, strict=True)}


def _move(move: Move, bounce_buffer: torch.Tensor, area: torch.Tensor) -> None:
    target = area[move.target : move.target + move.rows * move.row_bytes]
    if move.rows == 1:
        target.copy_(bounce_buffer[move.source : move.source + move.row_bytes], non_blocking=True)
        return
    rows = bounce_buffer[move.source :].as_strided((move.rows, move.row_bytes), (move.stride_bytes, 1))
    target.view(move.rows, move.row_bytes).copy_(rows, non_blocking=True)
