"""Stages a version of a log in memory on a GPU, and checks it there: no core of the host touches a byte.

A piece of the mapped files is copied to a passage, memory of the GPU beside the area. There its chunks are hashed, and
from there what the engine loads is copied to its place: what is loaded is a copy, within the GPU, of what was hashed,
and the way over PCIe has been checked with it. Nothing of it counts before all digests are those of the manifest. All
of that is queued, and a thread waits once, at the end. The kernels, of one warp a chunk, run beside the engine's own.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from rollout_service.engine.loading.placement import Move, Placement
from rollout_service.gpu_streams import own_stream
from rollout_service.store.reading import Piece, VersionReader
from rollout_service.threads import in_threads

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

    Args:
        reader: has the files mapped.
        found: of at most as many bytes as a passage; asked for while those before are copied.
        area: uint8 [bytes].
        passages: uint8 [bytes], on the same device.

    Raises LogCorrupt naming tensor, chunk and file.
    """
    batches = _Batches(found)
    for _ in in_threads(lambda passage: _stage(reader, batches, passage, placement, area), passages):
        pass


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
) -> None:
    with _stream(area.device) as stream, _waited_for(stream):
        hashed = [_queue(reader, batch, passage, placement, area) for batch in batches]
    for batch, hashing in hashed:
        _require(reader, batch, hashing)


def _queue(
    reader: VersionReader, batch: list[Piece], passage: torch.Tensor, placement: Placement, area: torch.Tensor
) -> tuple[list[Piece], "Hashing"]:
    from rollout_service.quant.digests import Hashing, Run  # needs triton

    address = passage.data_ptr()
    runs = [
        [Run(address + tensor.offset + chunk.start - piece.offset, chunk.nbytes) for tensor, chunk in piece.chunks]
        for piece in batch
    ]
    hashing = Hashing(runs, area.device)
    for number, piece in enumerate(batch):
        source = torch.frombuffer(reader.view(piece), dtype=torch.uint8)
        passage[: piece.nbytes].copy_(source, non_blocking=True)
        hashing.queue(number)
        for move in placement.moves(piece):
            _move(move, passage, area)
    hashing.collect()
    return batch, hashing


def _require(reader: VersionReader, batch: list[Piece], hashing: "Hashing") -> None:
    """Raises LogCorrupt, once the stream has come so far."""
    chunks = [(piece, entry) for piece in batch for entry in piece.chunks]

    def short(number: int) -> memoryview:
        piece, (tensor, chunk) = chunks[number]
        start = tensor.offset + chunk.start - piece.offset
        return reader.view(piece)[start : start + chunk.nbytes]

    reader.require([entry for _, entry in chunks], hashing.read(short))


def _move(move: Move, passage: torch.Tensor, area: torch.Tensor) -> None:
    target = area[move.target : move.target + move.rows * move.row_bytes]
    if move.rows == 1:
        target.copy_(passage[move.source : move.source + move.row_bytes], non_blocking=True)
        return
    rows = passage[move.source :].as_strided((move.rows, move.row_bytes), (move.stride_bytes, 1))
    target.view(move.rows, move.row_bytes).copy_(rows, non_blocking=True)


def _stream(device: torch.device) -> AbstractContextManager[torch.cuda.Stream | None]:
    return own_stream(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _waited_for(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Nothing is copied any more when this ends, however it does: the files may be unmapped then."""
    try:
        yield
    finally:
        if stream is not None:
            stream.synchronize()
