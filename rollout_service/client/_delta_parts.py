"""The parts of a delta, those of the largest tensors first. The parts of a version itself: ``_parts.py``.

The service makes a tensor once its last part has come: it decodes the changes, brings the tensor to its GPU, and copies
it back. Of an embedding or a head of a GB that takes as long as ten others take side by side, so whoever is sent last
should be small. In a table a head is the last tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from rollout_service.client._parts import Part


def largest_first(told: Sequence[tuple[bytes, int]], part_bytes: int) -> Iterator[Part]:
    """All parts of a delta's stream; those that hold changes of the same largest tensor by their numbers.

    ``told``: of each tensor what is sent of it, at least a byte, and how many bytes the tensor itself has.
    """
    held: dict[int, list[tuple[bytes, int, int]]] = {}
    largest: dict[int, int] = {}
    ends = accumulate(len(encoded) for encoded, _ in told)
    for (encoded, tensor_bytes), end in zip(told, ends, strict=True):
        start = end - len(encoded)
        for index in range(start // part_bytes, -(-end // part_bytes)):
            first, last = max(start, index * part_bytes), min(end, (index + 1) * part_bytes)
            held.setdefault(index, []).append((encoded, first - start, last - first))
            largest[index] = max(largest.get(index, 0), tensor_bytes)
    for index in sorted(held, key=lambda index: (-largest[index], index)):
        # numpy copies with Python's lock free
        pieces = [np.frombuffer(encoded, np.uint8, count, first) for encoded, first, count in held[index]]
        yield Part(index, [torch.from_numpy(np.concatenate(pieces))], None)
