"""Changes of a tensor applied on a GPU, which hashes the result anyway: the host only decompresses.

On the host each byte of the base would be copied, searched for by its changes, and copied to the GPU to be hashed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from rollout_service.gpu_streams import queued_to
from rollout_service.protocol import delta

MOST_BYTES = 64 << 20
"""Of a tensor, or of a part of one, that is made there at once."""
MOST_CHANGES = 1 / 16
"""Of its bytes: positions and differences of a change take 50 bytes until they are applied."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Made(NamedTuple):
    """A tensor that the current stream makes."""

    data: torch.Tensor
    """Its bytes, uint8 [nbytes]."""
    are_inside: torch.Tensor
    """bool []: whether each segment's changes lie in it. If not, they are at wrong places in ``data``."""


def made_on(device: torch.device, base: memoryview, segments: Sequence[delta.Segment], itemsize: int) -> Made | None:
    """Apply ``segments`` to a copy of ``base`` on ``device``, in its current stream; None: there are too many changes.

    ``base``: must stay what it is until the stream has come so far; it is copied at the speed of PCIe if its memory is
    registered with CUDA. Raises ValueError as ``delta.apply_segment``, but for positions outside a segment, which
    ``Made.are_inside`` tells, or ``torch.cuda.OutOfMemoryError``.
    """
    changed = [segment for segment in segments if delta.new_bytes(segment) is None]
    if sum(delta.count(segment, itemsize) for segment in changed) > MOST_CHANGES * base.nbytes:
        return None
    # decoded first, and whatever cannot be is found before the GPU is asked for memory
    decoded = [(segment, *delta.inflated(segment, itemsize)) for segment in changed]
    data = torch.empty(base.nbytes, dtype=torch.uint8, device=device)
    data.copy_(torch.frombuffer(base, dtype=torch.uint8), non_blocking=True)
    for segment in segments:
        if (new := delta.new_bytes(segment)) is not None:
            data[segment.place].copy_(queued_to(device, torch.from_numpy(np.frombuffer(new, np.uint8).copy())))
    if not decoded:
        return Made(data, torch.ones((), dtype=torch.bool, device=device))
    ends = np.cumsum([count for _, count, _ in decoded])
    planes = np.zeros((delta.GAP_PLANES + itemsize, ends[-1]), np.uint8)
    for (start, end), (_, _, of_segment) in zip(pairwise([0, *ends.tolist()]), decoded, strict=True):
        for row, values in zip(planes, of_segment, strict=True):
            if values:
                row[start:end] = np.frombuffer(values, np.uint8)
    places = [segment.place for segment, _, _ in decoded]
    table = np.array(
        [ends, [place.start // itemsize for place in places], [place.stop // itemsize for place in places]]
    )
    there, on_table = queued_to(device, torch.from_numpy(planes)), queued_to(device, torch.from_numpy(table))
    positions, are_inside = _positions(there[: delta.GAP_PLANES], *on_table)
    elements = data.view(_SIGNED[itemsize])
    # whatever was sent: an index outside the tensor would end all that this process does on the GPU
    positions.clamp_(max=elements.numel() - 1)
    elements[positions] += _differences(there[delta.GAP_PLANES :]).to(elements.dtype)
    return Made(data, are_inside)


def _positions(
    planes: torch.Tensor, ends: torch.Tensor, firsts: torch.Tensor, stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the tensor, int64 [changes], of gaps uint8 [planes, changes]; and whether all lie in their segments.

    int64 [segments]: ``ends``: of their changes; ``firsts``, ``stops``: of their elements.
    """
    passed = (_joined(planes) + 1).cumsum(0)
    until = passed[ends - 1]
    before = torch.cat([torch.zeros_like(until[:1]), until[:-1]])
    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    shifts = torch.repeat_interleave(firsts - 1 - before, counts, output_size=passed.numel())
    return passed + shifts, (until + firsts - 1 - before < stops).all()


def _differences(planes: torch.Tensor) -> torch.Tensor:
    """int64 [changes], of which the lowest bytes count."""
    codes = _joined(planes)
    return (codes >> 1) ^ -(codes & 1)


def _joined(planes: torch.Tensor) -> torch.Tensor:
    """int64 [numbers] of their bytes, uint8 [planes, numbers], the lowest first."""
    numbers = planes[0].long()
    for number, plane in enumerate(planes[1:], start=1):
        numbers |= plane.long() << (8 * number)
    return numbers
