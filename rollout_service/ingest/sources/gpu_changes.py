"""Apply the changes of many tensors on a GPU, which also hashes the results. The host only decompresses.

On the host, each byte of the base would be copied, changed, and copied to the GPU for hashing. On the GPU, one kernel
per element size handles all tensors of a batch. With about forty calls per tensor, the ingest's threads spent most of
their time waiting for the GIL.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
import triton
import triton.language as tl

from rollout_service.gpu.streams import on_device, own_stream_of, queued_to
from rollout_service.protocol import delta
from rollout_service.protocol.ring import aligned
from rollout_service.runtime.views import SIGNED

_PLANES = delta.GAP_PLANES + max(SIGNED)
"""Number of planes for the largest elements. For smaller elements the last planes are zeros."""
_AT_ONCE = 1024
"""Number of changes that a program of the kernel handles at once."""


class Changed:
    """A tensor of the base, and its decompressed changes."""

    def __init__(self, base: memoryview, encoded: memoryview, itemsize: int) -> None:
        """
        Args:
            base: its bytes. They must not change before the stream has copied them, and are copied at PCIe speed if
                their memory is registered with CUDA.
            encoded: its changes, as ``delta.joined`` returns them, with elements of ``itemsize`` bytes.

        Raises ValueError like ``delta.apply_segment``, except for positions outside a segment, which ``Made`` reports.
        """
        self.base, self.itemsize = base, itemsize
        self.whole: list[tuple[slice, memoryview]] = []
        """Segments that were sent whole."""
        self.segments: list[tuple[slice, int, list[bytes]]] = []
        """All other segments: number of changes, and the planes of their positions and differences."""
        for segment in delta.changed_segments(encoded, base.nbytes, itemsize):
            if (new := delta.new_bytes(segment)) is not None:
                self.whole.append((segment.place, new))
            else:
                self.segments.append((segment.place, *delta.inflated(segment, itemsize)))


@dataclass(frozen=True)
class Made:
    """Tensors that the current stream produces."""

    tensors: list[torch.Tensor]
    """The new bytes of each tensor, uint8 [nbytes], on the GPU."""
    is_outside: torch.Tensor
    """bool [segments with changes]: True if a change lies outside the segment; such changes were not applied."""
    _owners: list[int]
    """Index of the tensor of each entry of ``is_outside``."""
    _became: list[torch.Tensor]
    """Values of ``became`` for each tensor; slices of one memory for elements of one size."""

    def became(self, first: int, end: int) -> torch.Tensor:
        """Return the new values of changed elements in the tensors ``first`` to ``end`` (exclusive), without segments
        that were sent whole: int8, int16 or int32 [changes]. The elements of all these tensors must have one size."""
        of_first = self._became[first]
        changes = sum(each.numel() for each in self._became[first:end])
        return of_first.as_strided((changes,), (1,))

    def first_outside(self) -> int | None:
        """Return the first tensor with a change outside its segment. Waits for the stream."""
        found = self.is_outside.cpu().nonzero()
        return self._owners[int(found[0])] if found.numel() else None


def made_on(device: torch.device, tensors: Sequence[Changed]) -> Made:
    """Apply changes to copies of the bases on ``device``, in its current stream; on the CPU in Triton's interpreter.

    ``tensors``: those with one element size must be adjacent. They need their own size in GPU memory, and up to seven
    bytes for each change. Raises ``torch.cuda.OutOfMemoryError``.
    """
    ends = list(accumulate(aligned(tensor.base.nbytes) for tensor in tensors))
    room = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
    starts = [end - aligned(tensor.base.nbytes) for end, tensor in zip(ends, tensors, strict=True)]
    made = [room[start : start + tensor.base.nbytes] for start, tensor in zip(starts, tensors, strict=True)]
    for data, tensor in zip(made, tensors, strict=True):
        data.copy_(torch.frombuffer(tensor.base, dtype=torch.uint8), non_blocking=True)
        for place, new in tensor.whole:
            data[place].copy_(queued_to(device, torch.from_numpy(np.frombuffer(new, np.uint8).copy())))
    planes_on_device = _joined((plane for each in tensors for *_, planes in each.segments for plane in planes), device)
    owners = [number for number, tensor in enumerate(tensors) for _ in tensor.segments]
    is_outside = torch.zeros(len(owners), dtype=torch.bool, device=device)
    became: list[torch.Tensor] = []
    at = done = 0
    for itemsize, numbers in groupby(range(len(tensors)), lambda number: tensors[number].itemsize):
        table, counts = list[list[int]](), list[int]()
        changes = 0
        for number in numbers:
            before = changes
            for place, count, planes in tensors[number].segments:
                begins = [-1] * _PLANES
                for i, plane in enumerate(planes):
                    if plane:
                        begins[i] = at
                        at += len(plane)
                address = room.data_ptr() + starts[number] + place.start
                table.append([address, (place.stop - place.start) // itemsize, count, changes, *begins])
                changes += count
            counts.append(changes - before)
        of_launch = torch.empty(changes, dtype=SIGNED[itemsize], device=device)
        became += of_launch.split(counts)
        if table:
            with on_device(device):
                outside = is_outside[done : done + len(table)].view(torch.int8)
                on_gpu = queued_to(device, torch.tensor(table, dtype=torch.int64))
                apply_changes[(len(table),)](
                    on_gpu, planes_on_device, of_launch, outside, ITEMSIZE=itemsize, AT_ONCE=_AT_ONCE
                )
        done += len(table)
    return Made(made, is_outside, owners, became)


def prepare(device: torch.device) -> None:
    """Compile the kernels of ``made_on``. Takes seconds, once."""
    with own_stream_of(device), on_device(device):
        nothing = queued_to(device, torch.tensor([[0] * 4 + [-1] * _PLANES]))
        flags = torch.zeros(1, dtype=torch.uint8, device=device)
        for itemsize, dtype in SIGNED.items():
            became = torch.empty(1, dtype=dtype, device=device)
            apply_changes[(1,)](
                nothing, flags.clone(), became, flags.view(torch.int8), ITEMSIZE=itemsize, AT_ONCE=_AT_ONCE
            )


def _joined(planes: Iterable[bytes], device: torch.device) -> torch.Tensor:
    """Concatenate planes on the device, uint8."""
    arrays = [np.frombuffer(plane, np.uint8) for plane in planes if plane]
    joined = torch.empty(sum(map(len, arrays)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    if arrays:
        np.concatenate(arrays, out=joined.numpy())
    return joined.to(device, non_blocking=True)


# otherwise it is compiled again for flags with another alignment
@triton.jit(do_not_specialize_on_alignment=["is_outside"])
def apply_changes(segments, planes, became, is_outside, ITEMSIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add the differences to the changed elements of a segment; grid: (segments,).

    ``segments`` int64 [segments, 11]: address of the first element, number of elements, number of changes, index of the
    first change in ``became``, and the offset of each plane in ``planes`` uint8, -1 for zeros. There are three planes
    of gaps and four of differences in zigzag order (``protocol/delta.py``). ``became``, of the elements' size: [all
    changes]. ``is_outside``: int8 [segments].
    """
    entry = segments + 11 * tl.program_id(0)
    address, size, count, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    if ITEMSIZE == 1:
        elements = address.to(tl.pointer_type(tl.int8))
    elif ITEMSIZE == 2:
        elements = address.to(tl.pointer_type(tl.int16))
    else:
        elements = address.to(tl.pointer_type(tl.int32))
    last = tl.full((), -1, tl.int64)
    lane = tl.arange(0, AT_ONCE)
    for start in range(0, count, AT_ONCE):
        there = start + lane < count
        gap = tl.zeros((AT_ONCE,), tl.int64)
        for plane in tl.static_range(3):
            gap |= _plane(planes, tl.load(entry + 4 + plane), start + lane, there).to(tl.int64) << (8 * plane)
        code = tl.zeros((AT_ONCE,), tl.int32)
        for plane in tl.static_range(ITEMSIZE):
            code |= _plane(planes, tl.load(entry + 7 + plane), start + lane, there).to(tl.int32) << (8 * plane)
        # a logical shift, since with four bytes the sign bit is an ordinary bit
        difference = (code.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True) ^ -(code & 1)
        steps = tl.where(there, gap + 1, 0)
        positions = last + tl.cumsum(steps, 0)
        inside = there & (positions < size)
        old = tl.load(elements + positions, mask=inside, other=0)
        new = (old.to(tl.int32) + difference).to(old.dtype)  # keep the lowest bytes: it wraps around
        tl.store(elements + positions, new, mask=inside)
        tl.store(became + first + start + lane, tl.where(inside, new, 0).to(old.dtype), mask=there)
        last += tl.sum(steps, 0)
    tl.store(is_outside + tl.program_id(0), (last >= size).to(tl.int8))


@triton.jit
def _plane(planes, begin, number, there):
    """Load bytes of a plane as int32; 0 for a plane of zeros, or where ``there`` is False."""
    values = tl.zeros(number.shape, tl.int32)
    if begin >= 0:
        values = tl.load(planes + begin + number, mask=there, other=0).to(tl.int32)
    return values
