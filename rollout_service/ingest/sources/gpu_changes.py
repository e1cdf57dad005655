"""Changes of many tensors applied on a GPU, which hashes the results anyway: the host only decompresses.

On the host each byte of the base would be copied, searched for by its changes, and copied to the GPU to be hashed. Here
the tensors of a batch are one kernel for each size of their elements: with some forty calls for each tensor the threads
of an ingest waited for Python's lock most of the time, and not for bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from rollout_service.gpu_streams import on_device, own_stream_of, queued_to
from rollout_service.protocol import delta
from rollout_service.ring import aligned
from rollout_service.views import SIGNED

_PLANES = delta.GAP_PLANES + max(SIGNED)
"""Of elements that have fewer bytes the last ones are zeros."""
_AT_ONCE = 1024
"""Changes that a program of the kernel takes together."""


class Changed:
    """A tensor of the base, and what changes in it, decompressed."""

    def __init__(self, base: memoryview, encoded: memoryview, itemsize: int) -> None:
        """
        Args:
            base: its bytes. They must stay what they are until the stream has come so far, and are copied at the speed
                of PCIe if their memory is registered with CUDA.
            encoded: as ``delta.encode`` makes it, of elements of ``itemsize`` bytes.

        Raises ValueError as ``delta.apply``, but for positions outside a segment, which ``Made`` tells.
        """
        self.base, self.itemsize = base, itemsize
        self.whole: list[tuple[slice, memoryview]] = []
        """Segments of which all bytes came."""
        self.segments: list[tuple[slice, int, list[bytes]]] = []
        """The others: how many elements change, and the planes that say which and how."""
        for segment in delta.changed_segments(encoded, base.nbytes, itemsize):
            if (new := delta.new_bytes(segment)) is not None:
                self.whole.append((segment.place, new))
            else:
                self.segments.append((segment.place, *delta.inflated(segment, itemsize)))


@dataclass(frozen=True)
class Made:
    """Tensors that the current stream makes."""

    tensors: list[torch.Tensor]
    """The new bytes of each, uint8 [nbytes], on the GPU."""
    is_outside: torch.Tensor
    """bool [segments with changes]: whether some lie beyond the segment; those were left out."""
    _owners: list[int]
    """Of each of ``is_outside``, to which tensor it belongs."""
    _became: list[torch.Tensor]
    """Of each tensor, as ``became``; slices of one memory for elements of one size."""

    def became(self, first: int, end: int) -> torch.Tensor:
        """What the elements that changed in the tensors ``first`` to ``end`` (exclusive) have become, without those of
        whole segments: int8, int16 or int32 [changes]. The tensors' elements must have one size."""
        of_first = self._became[first]
        changes = sum(each.numel() for each in self._became[first:end])
        return of_first.as_strided((changes,), (1,))

    def first_outside(self) -> int | None:
        """The first tensor of which a change lies outside its segment. Waits for the stream."""
        found = self.is_outside.cpu().nonzero()
        return self._owners[int(found[0])] if found.numel() else None


class _Launch(NamedTuple):
    """Of the kernel, for tensors whose elements have one size."""

    itemsize: int
    segments: list[list[int]]
    """Its table."""
    changes: list[int]
    """Of each tensor."""


def made_on(device: torch.device, tensors: Sequence[Changed]) -> Made:
    """Apply changes to copies of the bases on ``device``, in its current stream; in Triton's interpreter on the CPU.

    ``tensors``: those with elements of one size follow each other. On the device they take memory once, and up to seven
    bytes for each change besides. Raises ``torch.cuda.OutOfMemoryError``.
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
    launches, owners = list[_Launch](), list[int]()
    at = 0
    for itemsize, numbers in groupby(range(len(tensors)), lambda number: tensors[number].itemsize):
        launch = _Launch(itemsize, [], [])
        changes = 0
        for number in numbers:
            before = changes
            for place, count, planes in tensors[number].segments:
                begins = []
                for plane in planes:
                    begins.append(at if plane else -1)
                    at += len(plane)
                address = room.data_ptr() + starts[number] + place.start
                size = (place.stop - place.start) // itemsize
                absent = [-1] * (_PLANES - len(begins))
                launch.segments.append([address, size, count, changes, *begins, *absent])
                owners.append(number)
                changes += count
            launch.changes.append(changes - before)
        launches.append(launch)
    became: list[torch.Tensor] = []
    is_outside = torch.zeros(len(owners), dtype=torch.bool, device=device)
    done = 0
    with on_device(device):
        for itemsize, segments, counts in launches:
            of_launch = torch.empty(sum(counts), dtype=SIGNED[itemsize], device=device)
            became += of_launch.split(counts)
            if segments:
                table = queued_to(device, torch.tensor(segments, dtype=torch.int64))
                outside = is_outside[done : done + len(segments)].view(torch.int8)
                apply_changes[(len(segments),)](
                    table, planes_on_device, of_launch, outside, ITEMSIZE=itemsize, AT_ONCE=_AT_ONCE
                )
            done += len(segments)
    return Made(made, is_outside, owners, became)


def prepare(device: torch.device) -> None:
    """Compile what ``made_on`` needs, which takes seconds once."""
    with own_stream_of(device), on_device(device):
        nothing = queued_to(device, torch.tensor([[0] * 4 + [-1] * _PLANES]))
        flags = torch.zeros(1, dtype=torch.uint8, device=device)
        for itemsize, dtype in SIGNED.items():
            became = torch.empty(1, dtype=dtype, device=device)
            apply_changes[(1,)](
                nothing, flags.clone(), became, flags.view(torch.int8), ITEMSIZE=itemsize, AT_ONCE=_AT_ONCE
            )


def _joined(planes: Iterable[bytes], device: torch.device) -> torch.Tensor:
    """uint8, one after the other."""
    arrays = [np.frombuffer(plane, np.uint8) for plane in planes if plane]
    joined = torch.empty(sum(map(len, arrays)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    if arrays:
        np.concatenate(arrays, out=joined.numpy())
    return joined.to(device, non_blocking=True)


@triton.jit(do_not_specialize_on_alignment=["is_outside"])  # or it is compiled anew for flags that begin elsewhere
def apply_changes(segments, planes, became, is_outside, ITEMSIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add to the elements of a segment that have changed their differences; grid: (segments,).

    ``segments`` int64 [segments, 11]: address of its first element, elements, changes, the first of these in
    ``became``, and where each plane begins in ``planes`` uint8, -1 for zeros: three of gaps, four of differences in
    zigzag order (``protocol/delta.py``). ``became`` of the elements' size [changes of all]. ``is_outside`` int8
    [segments].
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
        # a logical shift: of four bytes the sign's place is a bit like the others
        difference = (code.to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True) ^ -(code & 1)
        steps = tl.where(there, gap + 1, 0)
        positions = last + tl.cumsum(steps, 0)
        inside = there & (positions < size)
        old = tl.load(elements + positions, mask=inside, other=0)
        new = (old.to(tl.int32) + difference).to(old.dtype)  # the lowest bytes: it wraps around
        tl.store(elements + positions, new, mask=inside)
        tl.store(became + first + start + lane, tl.where(inside, new, 0).to(old.dtype), mask=there)
        last += tl.sum(steps, 0)
    tl.store(is_outside + tl.program_id(0), (last >= size).to(tl.int8))


@triton.jit
def _plane(planes, begin, number, there):
    """int32: these bytes of a plane; 0 where it is one of zeros, or not ``there``."""
    values = tl.zeros(number.shape, tl.int32)
    if begin >= 0:
        values = tl.load(planes + begin + number, mask=there, other=0).to(tl.int32)
    return values
