"""Read the tensors of a version from its files one after the other, and check them in the memory that is loaded.

Used for versions that are not in a staging buffer. The files are not mapped, because a mapped file can change or shrink
after the check.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rollout_service.engine.loading.staging import tensor_view
from rollout_service.protocol.tensors import STORED_DTYPE_BYTES
from rollout_service.runtime.threads import io_threads
from rollout_service.store.buffers import BufferPool
from rollout_service.store.manifest import Manifest, StoredTensor
from rollout_service.store.reading import Piece, VersionReader

_BATCH_BYTES = 16 << 20


def stored_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors on the CPU in file order, read ahead by a few threads.

    Memory is reused once nothing refers to a tensor in it. No address of a tensor is returned to the system before the
    end. Raises OSError, or LogCorrupt, which names tensor, chunk and file.
    """
    memory = BufferPool()

    def read(piece: Piece) -> torch.Tensor:
        buffer = memory.take(max(piece.nbytes, _BATCH_BYTES))
        reader.read(piece, buffer)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    with VersionReader(folder, manifest) as reader, ThreadPoolExecutor(io_threads()) as threads:
        ahead: deque[tuple[Piece, Future[torch.Tensor]]] = deque()
        try:
            for piece in batches(manifest.in_order(), _BATCH_BYTES):
                ahead.append((piece, threads.submit(read, piece)))
                if len(ahead) > io_threads():
                    yield from _views(*ahead.popleft())
            while ahead:
                yield from _views(*ahead.popleft())
        finally:
            for _, reading in ahead:
                reading.cancel()


def _views(piece: Piece, reading: Future[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    memory = reading.result()
    for tensor in dict.fromkeys(tensor for tensor, _ in piece.chunks):
        start = tensor.offset - piece.offset
        yield tensor.name, tensor_view(memory[start : start + tensor.nbytes], tensor)


def batches(tensors: Iterable[StoredTensor], most_bytes: int) -> Iterator[Piece]:
    """Yield pieces of whole tensors in file order. Each piece is read at once, and its tensors are views of it.

    A tensor whose elements would be misaligned begins a new piece. So does a tensor with which a piece would exceed
    ``most_bytes``.
    """
    group: list[StoredTensor] = []
    for tensor in tensors:
        if group and not _may_join(group, tensor, most_bytes):
            yield _batch(group)
            group = []
        group.append(tensor)
    if group:
        yield _batch(group)


def _may_join(group: list[StoredTensor], tensor: StoredTensor, most_bytes: int) -> bool:
    first, last = group[0], group[-1]
    return (
        (tensor.file, tensor.offset) == (last.file, last.offset + last.nbytes)
        and tensor.offset + tensor.nbytes - first.offset <= most_bytes
        and (tensor.offset - first.offset) % STORED_DTYPE_BYTES[tensor.dtype] == 0
    )


def _batch(group: list[StoredTensor]) -> Piece:
    first, last = group[0], group[-1]
    chunks = tuple((tensor, chunk) for tensor in group for chunk in tensor.chunks())
    return Piece(first.file, first.offset, last.offset + last.nbytes - first.offset, chunks)
