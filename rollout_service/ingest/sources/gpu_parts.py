"""Copy tensors from parts in registered memory to the GPU. Adjacent tensors of the stream are one copy.

A part of 16 MiB has about twenty tensors of codes and scales of a mixture of experts. Copying each by itself takes a
dozen torch calls, after each of which a thread waits for the GIL while others receive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout_service.ingest.sources.source import of_dtype
from rollout_service.model.convert import BATCH_BYTES, Named
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor
from rollout_service.runtime.views import view_at
from rollout_service.store.layout import groups_of

_ALIGNED_BYTES = 16
"""Alignment in bytes of each tensor, at which kernels read fastest."""


class InStream(NamedTuple):
    """A tensor of an upload, with its offset and size in the stream."""

    tensor: UploadTensor
    offset: int
    nbytes: int


def is_registered(memory: torch.Tensor) -> bool:
    """Return True if a GPU can copy from this host memory asynchronously."""
    return memory.is_pinned()


@dataclass(slots=True)
class _Run:
    """A contiguous range of bytes to copy."""

    offset: int
    """Offset in the stream."""
    start: int
    """Offset in the copy."""
    nbytes: int = 0


class RegisteredParts:
    """Parts in registered memory, for one call of one thread."""

    def __init__(self, data: Mapping[int, memoryview | None], part_bytes: int, gpu: torch.device) -> None:
        """``data``: the bytes of each part that is in memory. ``gpu``: the GPU with which some of it is registered."""
        self._data, self._part_bytes, self._gpu = data, part_bytes, gpu
        self._known: dict[int, torch.Tensor | None] = {}

    def hold(self, wanted: InStream) -> bool:
        """Return True if all bytes of a non-empty tensor are in registered parts."""
        first, last = wanted.offset // self._part_bytes, (wanted.offset + wanted.nbytes - 1) // self._part_bytes
        return all(self._part(part) is not None for part in range(first, last + 1))

    def read(self, wanted: Sequence[InStream]) -> Iterator[Named]:
        """Yield tensors that these parts ``hold``, on the GPU. They are queued on the current stream; parts must stay
        until it has copied them.

        They are copied ``BATCH_BYTES`` at a time, when the first tensor of each batch is requested. A larger tensor is
        its own batch.
        """
        for several in groups_of(wanted, BATCH_BYTES):
            yield from self._copied(several)

    def _copied(self, several: Sequence[InStream]) -> Iterator[Named]:
        runs, starts = _laid_out(several)
        memory = torch.empty(aligned(runs[-1].start + runs[-1].nbytes), dtype=torch.uint8, device=self._gpu)
        for run in runs:
            self._copy(run, memory)
        of_dtypes: dict[str, torch.Tensor] = {}
        for (tensor, _, _), start in zip(several, starts, strict=True):
            if (whole := of_dtypes.get(tensor.dtype)) is None:
                whole = of_dtypes[tensor.dtype] = of_dtype(memory, tensor.dtype, (-1,))
            yield tensor.name, view_at(whole, start // DTYPE_BYTES[tensor.dtype], tensor.shape)

    def _copy(self, run: _Run, memory: torch.Tensor) -> None:
        done = 0
        while done < run.nbytes:
            part, first = divmod(run.offset + done, self._part_bytes)
            count = min(self._part_bytes - first, run.nbytes - done)
            source = self._part(part)
            assert source is not None
            start = run.start + done
            memory[start : start + count].copy_(source[first : first + count], non_blocking=True)
            done += count

    def _part(self, part: int) -> torch.Tensor | None:
        """Return uint8 [part_bytes, or less for the last]; None if it is not registered."""
        if part not in self._known:
            data = self._data.get(part)
            memory = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
            self._known[part] = memory if memory is not None and is_registered(memory) else None
        return self._known[part]


def _laid_out(several: Sequence[InStream]) -> tuple[list[_Run], list[int]]:
    """Return the ranges to copy, and the offset of each tensor in the copy."""
    runs: list[_Run] = []
    starts: list[int] = []
    end, follows = 0, -1
    for _, offset, nbytes in several:
        if offset != follows or end % _ALIGNED_BYTES:
            end = aligned(end)
            runs.append(_Run(offset, end))
        starts.append(end)
        runs[-1].nbytes += nbytes
        end, follows = end + nbytes, offset + nbytes
    return runs, starts
