"""Find the changes in a batch of pieces on the GPU that holds the new tensors.

There are two steps. The first computes the differences of all elements and counts them. The counts on the host are the
only wait of the queueing thread. The second builds positions, differences and encoding planes of the nonzero elements,
and copies them to the host. The encoding threads wait for that copy. The next batch is counted before this one's counts
are awaited, so that the GPU stays busy.

GPU memory, computed and not measured:

- Up to four times ``BATCH_BYTES`` (128 MiB): the batch being uploaded, the one counted, the one read, and the one not
  yet released.
- About 30 bytes for each change; at most ``MOST_CHANGES`` are read at once, a quarter of a GB.
- Another three times ``BATCH_BYTES`` if the trainer's codes wait for their batch. Codes share the memory of all tensors
  quantized at once, half of ``CONVERTED_BYTES`` (256 MiB).
- For tensors that the trainer does not keep: another four times ``BATCH_BYTES`` for BF16, ``CONVERTED_BYTES``, and the
  largest tensor. They are held until the batch is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.client._pieces import BATCH_BYTES, Batch, Piece
from rollout_service.gpu.streams import queue_to_host, record_waiter, upload_stream
from rollout_service.protocol import delta
from rollout_service.runtime.views import bytes_of
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, joined_digests

MOST_CHANGES = BATCH_BYTES // 16
"""Maximum number of changes that are read at once. A single piece may have more."""


class Digests:
    """Digests of tensors that the current stream has produced, computed on their GPU."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], device: torch.device) -> None:
        """Queue the hashing. ``tensors``: contiguous and not empty; the stream reads them before their memory is
        reused."""
        from rollout_service.quant.digests import MIN_BYTES, Hashing, chunks_of  # imports triton

        self.tensors = tuple(tensors)
        addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], np.int64)
        owners, starts, nbytes = chunks_of(np.array([each.nbytes for each in tensors.values()], np.int64), CHUNK_BYTES)
        self._edges = np.searchsorted(owners, np.arange(len(tensors) + 1)).tolist()
        self._hashing = Hashing([np.stack([addresses[owners] + starts, nbytes], axis=1)], device)
        self._hashing.queue(0)
        self._hashing.collect()
        short = np.flatnonzero(nbytes < MIN_BYTES)
        self._short_ends = dict(zip(short.tolist(), np.cumsum(nbytes[short]).tolist(), strict=True))
        self._short: torch.Tensor | None = None
        if short.size:
            flats = [bytes_of(tensor) for tensor in tensors.values()]
            places = zip(owners[short].tolist(), starts[short].tolist(), nbytes[short].tolist(), strict=True)
            parts = [flats[owner][start : start + length] for owner, start, length in places]
            self._short = queue_to_host(torch.cat(parts))
        self._nbytes = nbytes

    def read(self) -> dict[int, str]:
        """Return the digest of each tensor, as ``StoredTensor.digest``. The stream must have finished. Thread-safe."""
        found = self._hashing.read(self._short_bytes)
        of_tensors = zip(self.tensors, self._edges, self._edges[1:], strict=False)
        return {
            tensor: joined_digests(found[start * DIGEST_BYTES : end * DIGEST_BYTES])[0]
            for tensor, start, end in of_tensors
        }

    def _short_bytes(self, run: int) -> memoryview:
        assert self._short is not None
        end = self._short_ends[run]
        data: memoryview = self._short.numpy()[end - int(self._nbytes[run]) : end].data
        return data


@dataclass(frozen=True, slots=True)
class Counting:
    """A batch whose changes the current stream counts."""

    batch: Batch
    differences: torch.Tensor
    """uint8 [batch.nbytes] on the GPU: new bits minus old bits of each element, with wrap-around."""
    digests: Digests | None
    """Digests of the tensors that begin in the batch, available with the counts. None: no tensor begins there."""
    counts_there: torch.Tensor
    wait: Callable[[], None]

    def counts(self) -> list[int]:
        """Wait, and return the number of changed elements of each piece."""
        self.wait()
        counts: list[int] = self.counts_there.tolist()
        return counts


def queue_count(
    batch: Batch,
    pieces: Sequence[Piece],
    old: torch.Tensor,
    new: Sequence[Sequence[torch.Tensor]],
) -> Counting:
    """Queue the count of a batch on the current stream, without waiting.

    Raises ``torch.cuda.OutOfMemoryError``.

    Args:
        pieces: the pieces of the batch, in its order.
        old: uint8 [batch.nbytes]; overwritten with the differences.
        new: the contiguous tensor of each span of each piece. Tensors that begin in the batch are hashed.
    """
    from rollout_service.gpu.grouped_difference import Pair, subtract_in_place  # imports triton

    begin = old.data_ptr()
    pairs: list[Pair] = []
    begun: dict[int, torch.Tensor] = {}
    for number, (piece, piece_place, tensors) in enumerate(zip(pieces, batch.places, new, strict=True)):
        for (index, part, place), tensor in zip(piece.spans, tensors, strict=True):
            there = begin + piece_place.start + place.start
            pairs.append(Pair(tensor.data_ptr() + part.start, there, part.stop - part.start, piece.itemsize, number))
            if not part.start:
                begun[index] = tensor
    counts = subtract_in_place(pairs, len(pieces), old.device)
    digests = Digests(begun, old.device) if begun else None
    return Counting(batch, old, digests, queue_to_host(counts), record_waiter(old.device))


@dataclass(frozen=True, slots=True)
class Found:
    """Changes that the current stream reads. They are on the host once ``wait`` returns."""

    positions: npt.NDArray[np.int32]
    """Element indices [changes], ascending."""
    differences: npt.NDArray[Any]
    """New bits minus old bits [changes], signed."""
    planes: npt.NDArray[np.uint8]
    """Input of ``delta.encode_planes`` for one segment. The gap of the first element is unset."""
    wait: Callable[[], None]


def queue_search(differences: torch.Tensor, count: int) -> Found:
    """Queue the read of the ``count`` nonzero elements on the current stream, without waiting.

    ``differences``: signed integers [N]. Raises ``torch.cuda.OutOfMemoryError``.
    """
    from rollout_service.gpu.grouped_difference import changes_of  # imports triton

    itemsize = differences.element_size()
    if not count:
        nothing, no_planes = np.empty(0, np.int32), np.empty((delta.GAP_PLANES + itemsize, 0), np.uint8)
        return Found(nothing, nothing.astype(f"i{itemsize}"), no_planes, wait=lambda: None)
    on_host = queue_to_host(changes_of(differences, count, delta.GAP_PLANES)).numpy()
    numbers, planes = on_host[: -delta.GAP_PLANES - itemsize].reshape(-1), on_host[-delta.GAP_PLANES - itemsize :]
    end = 4 * count
    return Found(
        numbers[:end].view("i4"), numbers[end:].view(f"i{itemsize}"), planes, record_waiter(differences.device)
    )


def runs_of(pieces: Sequence[Piece], counts: Sequence[int]) -> list[slice]:
    """Return slices of a batch's pieces whose changes are read at once. Pieces that are not sparse are in none."""
    runs: list[slice] = []
    changes = 0
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        if not delta.is_sparse(count, piece.itemsize, piece.nbytes):
            continue
        run = runs[-1] if runs else slice(0, 0)
        if number == run.stop > 0 and piece.itemsize == pieces[run.start].itemsize and changes + count <= MOST_CHANGES:
            runs[-1] = slice(run.start, number + 1)
            changes += count
        else:
            runs.append(slice(number, number + 1))
            changes = count
    return runs


class Uploads:
    """Copies of batches to one GPU, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = upload_stream(device) if device.type == "cuda" else None
        self._begun: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}

    def begin(self, number: int, kept: torch.Tensor) -> None:
        """Start the copy of the bytes ``kept`` of batch ``number``. Raises ``torch.cuda.OutOfMemoryError``."""
        if number in self._begun:
            return
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(kept, device=self._device).copy_(kept, non_blocking=True)
            self._begun[number] = copy, self._stream.record_event() if self._stream is not None else None

    def close(self) -> None:
        """Wait for copies that nobody took, so that the memory they read can be freed."""
        for _, done in self._begun.values():
            if done is not None:
                done.synchronize()

    def take(self, number: int, kept: torch.Tensor) -> torch.Tensor:
        """Return the batch's bytes on the GPU. The current stream may write to them."""
        self.begin(number, kept)
        copy, done = self._begun.pop(number)
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            copy.record_stream(current)
        return copy
