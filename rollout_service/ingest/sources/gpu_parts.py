"""Tensors of parts in memory that is registered with a GPU, copied there: neighbours in the stream are one copy.

A part of 16 MiB has some twenty codes and scales of a mixture of experts. To copy each of them by itself takes a dozen
calls of torch, after each of which a thread waits for Python's lock while others receive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout_service.ingest.sources.source import of_dtype
from rollout_service.model.convert import BATCH_BYTES, Named
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor
from rollout_service.ring import aligned
from rollout_service.store.layout import groups_of
from rollout_service.views import view_at

_ALIGNED_BYTES = 16
"""Each tensor begins at a multiple of them, where kernels read fastest."""


class InStream(NamedTuple):
    """A tensor of an upload, and where its bytes are in the stream."""

    tensor: UploadTensor
    offset: int
    nbytes: int


def is_registered(memory: torch.Tensor) -> bool:
    """Whether a GPU copies from this memory of the host while nobody waits."""
    return memory.is_pinned()


@dataclass(slots=True)
class _Run:
    """Bytes that are copied as they are."""

    offset: int
    """In the stream."""
    start: int
    """In the copy."""
    nbytes: int = 0


class RegisteredParts:
    """Parts in registered memory, for one call of one thread."""

    def __init__(self, data: Mapping[int, memoryview | None], part_bytes: int, gpu: torch.device) -> None:
        """``data``: of each part that is in memory. ``gpu``: with which some of it is registered."""
        self._data, self._part_bytes, self._gpu = data, part_bytes, gpu
        self._known: dict[int, torch.Tensor | None] = {}

    def hold(self, wanted: InStream) -> bool:
        """Whether all bytes of a tensor, which has some, are in such parts."""
        first, last = wanted.offset // self._part_bytes, (wanted.offset + wanted.nbytes - 1) // self._part_bytes
        return all(self._part(part) is not None for part in range(first, last + 1))

    def read(self, wanted: Sequence[InStream]) -> Iterator[Named]:
        """Tensors that these parts ``hold``: each on the GPU, queued on the current stream, which the parts must
        outlast.

        They are copied ``BATCH_BYTES`` at a time, or one that is larger, when the first of those is asked for.
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
        """uint8 [part_bytes, or less of the last]; None: it is not registered."""
        if part not in self._known:
            data = self._data.get(part)
            memory = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
            self._known[part] = memory if memory is not None and is_registered(memory) else None
        return self._known[part]


def _laid_out(several: Sequence[InStream]) -> tuple[list[_Run], list[int]]:
    """What is copied, and where in the copy each tensor begins."""
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
