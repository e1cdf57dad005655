"""What changes in a batch of pieces, found on the GPU that holds the new tensors.

In two steps: the differences of all elements are made and counted; once the counts are on the host, which is the only
wait of the thread that queues, positions, differences and the planes of their encoding are made of those that are not
zero, and copied to the host, where whoever encodes them waits. The next batch is counted before this one's
counts are waited for: the GPU has work meanwhile.

Of the GPU's memory that takes ``BATCH_BYTES`` (128 MiB) up to four times: for the batch whose old bytes are copied
there, the one that is counted, the one of which changes are read, and the one that the GPU is not quite done with; and
some 30 bytes for each change, of which ``MOST_CHANGES`` (a quarter of a GB) are read at once. New tensors are held
until those of their batch are all there, and codes share the memory of all that were quantized at once, half of
``CONVERTED_BYTES`` (256 MiB): another three times ``BATCH_BYTES``. What they were quantized from is held until the
batch was waited for: if the trainer does not hold it anyhow, another four times ``BATCH_BYTES`` for BF16,
``CONVERTED_BYTES``, and the largest tensor.
These figures are computed, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.client._pieces import BATCH_BYTES, Batch, Piece
from rollout_service.gpu_streams import passed, queued_to_host, upload_stream
from rollout_service.protocol import delta
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, joined_digests
from rollout_service.views import bytes_of

MOST_CHANGES = BATCH_BYTES // 16
"""That are read at once; or those of a single piece."""


class Digests:
    """Of tensors that the current stream has made, each hashed where it lies."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], device: torch.device) -> None:
        """``tensors``: contiguous, at least a byte each. The stream reads them; its allocator may have them then."""
        from rollout_service.quant.digests import LEAST_BYTES, Hashing, chunks_of  # needs triton

        self.tensors = tuple(tensors)
        addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], np.int64)
        owners, starts, nbytes = chunks_of(np.array([each.nbytes for each in tensors.values()], np.int64), CHUNK_BYTES)
        self._edges = np.searchsorted(owners, np.arange(len(tensors) + 1)).tolist()
        self._hashing = Hashing([np.stack([addresses[owners] + starts, nbytes], axis=1)], device)
        self._hashing.queue(0)
        self._hashing.collect()
        short = np.flatnonzero(nbytes < LEAST_BYTES)
        self._short_ends = dict(zip(short.tolist(), np.cumsum(nbytes[short]).tolist(), strict=True))
        self._short: torch.Tensor | None = None
        if short.size:
            flats = [bytes_of(tensor) for tensor in tensors.values()]
            places = zip(owners[short].tolist(), starts[short].tolist(), nbytes[short].tolist(), strict=True)
            parts = [flats[owner][start : start + length] for owner, start, length in places]
            self._short = queued_to_host(torch.cat(parts))
        self._nbytes = nbytes

    def read(self) -> dict[int, str]:
        """Of each tensor, as ``StoredTensor.digest``. The stream must have come so far. For any thread."""
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
    """A batch of which the current stream counts the changes."""

    batch: Batch
    differences: torch.Tensor
    """uint8 [batch.nbytes], there: new bits minus old bits of each element, which wrap around."""
    digests: Digests | None
    """Of tensors that begin in the batch; None: none does. They are there when the counts are."""
    counts_there: torch.Tensor
    wait: Callable[[], None]

    def counts(self) -> list[int]:
        """Of each piece, the elements that changed; waits for them."""
        self.wait()
        counts: list[int] = self.counts_there.tolist()
        return counts


def counting(
    batch: Batch,
    pieces: Sequence[Piece],
    old: torch.Tensor,
    new: Sequence[Sequence[torch.Tensor]],
) -> Counting:
    """Queue on the current stream what ``Counting`` tells, with no wait.

    Args:
        pieces: those of the batch, in its order.
        old: uint8 [batch.nbytes], which become the differences.
        new: of each piece, the tensor of each span, contiguous. Those that begin in the batch are hashed.

    Raises ``torch.cuda.OutOfMemoryError``.
    """
    from rollout_service.grouped_difference import Pair, subtract_in_place  # needs triton

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
    return Counting(batch, old, digests, queued_to_host(counts), passed(old.device))


@dataclass(frozen=True, slots=True)
class Found:
    """Changes that the current stream reads, on the host once ``wait`` returns."""

    positions: npt.NDArray[np.int32]
    """[changes], ascending."""
    differences: npt.NDArray[Any]
    """[changes]: new bits minus old bits, signed."""
    planes: npt.NDArray[np.uint8]
    """As ``delta.encode_planes`` takes them, but that all are one segment, of whose first gap nothing is said."""
    wait: Callable[[], None]


def found(differences: torch.Tensor, count: int) -> Found:
    """Queue on the current stream what ``Found`` tells of the ``count`` elements that are not zero, with no wait.

    ``differences``: signed [N]. Raises ``torch.cuda.OutOfMemoryError``.
    """
    from rollout_service.grouped_difference import changes_of  # needs triton

    itemsize = differences.element_size()
    if not count:
        nothing, no_planes = np.empty(0, np.int32), np.empty((delta.GAP_PLANES + itemsize, 0), np.uint8)
        return Found(nothing, nothing.astype(f"i{itemsize}"), no_planes, _now)
    on_host = queued_to_host(changes_of(differences, count, delta.GAP_PLANES)).numpy()
    numbers, planes = on_host[: -delta.GAP_PLANES - itemsize].reshape(-1), on_host[-delta.GAP_PLANES - itemsize :]
    end = 4 * count
    return Found(numbers[:end].view("i4"), numbers[end:].view(f"i{itemsize}"), planes, passed(differences.device))


def _now() -> None:
    """What waits for nothing."""


def runs_of(pieces: Sequence[Piece], counts: Sequence[int]) -> list[slice]:
    """Pieces of a batch whose changes are read at once, by their places in it; none of those that are not sparse."""
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
    """Copies of batches to one GPU, beside what is computed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = upload_stream(device) if device.type == "cuda" else None
        self._begun: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}

    def begin(self, number: int, kept: torch.Tensor) -> None:
        """``number``: of the batch, whose bytes are ``kept``. Raises ``torch.cuda.OutOfMemoryError``."""
        if number in self._begun:
            return
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(kept, device=self._device).copy_(kept, non_blocking=True)
            self._begun[number] = copy, self._stream.record_event() if self._stream is not None else None

    def close(self) -> None:
        """Wait for copies that nobody took: the memory that they read may be given back."""
        for _, done in self._begun.values():
            if done is not None:
                done.synchronize()

    def take(self, number: int, kept: torch.Tensor) -> torch.Tensor:
        """The batch's bytes there, for the current stream, which may write to them."""
        self.begin(number, kept)
        copy, done = self._begun.pop(number)
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            copy.record_stream(current)
        return copy
