"""Stages a version of a log in memory on a GPU, and checks it there: no core of the host touches a byte.

A piece of the mapped files is copied to a passage, memory of the GPU beside the area. There its chunks are hashed, and
from there what the engine loads is copied to its place: what is loaded is a copy, within the GPU, of what was hashed,
and the way over PCIe has been checked with it. Nothing of it counts before all digests are those of the manifest. All
of that is queued, and a thread waits once, at the end. The kernels, of one warp a chunk, run beside the engine's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from rollout_service.engine.loading.placement import Move, Placement
from rollout_service.gpu_streams import own_stream
from rollout_service.store.reading import Piece, VersionReader
from rollout_service.threads import in_threads

PASSAGE_BYTES = 32 << 20
"""Of a file, that are copied, hashed and moved at once."""
PASSAGES = 4
"""One is copied to while others are hashed; each is one thread's. Taken with the area."""


def stage_on_device(
    reader: VersionReader,
    found: Sequence[Piece],
    placement: Placement,
    area: torch.Tensor,
    passages: Sequence[torch.Tensor],
) -> None:
    """Copy what ``placement`` has of these pieces to the area, and check all of their chunks.

    Args:
        reader: has the files mapped.
        found: of at most as many bytes as a passage.
        area: uint8 [bytes].
        passages: uint8 [bytes], on the same device.

    Raises LogCorrupt naming tensor, chunk and file.
    """
    lanes = [(list(found[first :: len(passages)]), passage) for first, passage in enumerate(passages)]
    for _ in in_threads(lambda lane: _stage(reader, *lane, placement, area), [lane for lane in lanes if lane[0]]):
        pass


def _stage(
    reader: VersionReader, found: list[Piece], passage: torch.Tensor, placement: Placement, area: torch.Tensor
) -> None:
    from rollout_service.quant.digests import Hashing, Run  # needs triton

    address = passage.data_ptr()
    places = [[tensor.offset + chunk.start - piece.offset for tensor, chunk in piece.chunks] for piece in found]
    runs = [
        [Run(address + start, chunk.nbytes) for start, (_, chunk) in zip(starts, piece.chunks, strict=True)]
        for starts, piece in zip(places, found, strict=True)
    ]
    with _stream(area.device) as stream, _waited_for(stream):
        hashing = Hashing(runs, area.device)
        for number, piece in enumerate(found):
            source = torch.frombuffer(reader.view(piece), dtype=torch.uint8)
            passage[: piece.nbytes].copy_(source, non_blocking=True)
            hashing.queue(number)
            for move in placement.moves(piece):
                _move(move, passage, area)
        chunks = [
            (piece, start, entry)
            for piece, starts in zip(found, places, strict=True)
            for start, entry in zip(starts, piece.chunks, strict=True)
        ]

        def short(number: int) -> memoryview:
            piece, start, (_, chunk) = chunks[number]
            return reader.view(piece)[start : start + chunk.nbytes]

        digests = hashing.read(short)  # waits for the stream
    reader.require([entry for _, _, entry in chunks], digests)


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
