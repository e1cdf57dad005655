"""Read the tensors of a version from its files one after the other, and check them in the memory that is loaded.

Used for versions that are not in a staging buffer. The files are not mapped, because a mapped file can change or shrink
after the check.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rollout_service.engine.loading.placement import batches
from rollout_service.engine.loading.staging import tensor_view
from rollout_service.runtime.threads import io_threads
from rollout_service.store.buffers import BufferPool
from rollout_service.store.manifest import Manifest
from rollout_service.store.reading import Piece, VersionReader

_BATCH_BYTES = 16 << 20


def stored_tensors(
    folder: Path, manifest: Manifest, taken: Callable[[str, torch.Tensor], None] = lambda *_: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors on the CPU in file order, read ahead by a few threads.

    Memory is reused once nothing refers to a tensor in it. No address of a tensor is returned to the system before the
    end. Raises OSError, or LogCorrupt, which names tensor, chunk and file.

    ``taken``: called with each tensor before it is yielded.
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
                    yield from _views(*ahead.popleft(), taken)
            while ahead:
                yield from _views(*ahead.popleft(), taken)
        finally:
            for _, reading in ahead:
                reading.cancel()


def _views(
    piece: Piece, reading: Future[torch.Tensor], taken: Callable[[str, torch.Tensor], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    memory = reading.result()
    for tensor in dict.fromkeys(tensor for tensor, _ in piece.chunks):
        start = tensor.offset - piece.offset
        view = tensor_view(memory[start : start + tensor.nbytes], tensor)
        taken(tensor.name, view)
        yield tensor.name, view
