"""A bucket: tensors that one thread converts together. Every source of weights delivers buckets."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple

import torch

from rollout_service.model.convert import Named
from rollout_service.protocol.upload import UploadTensor

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans


class GpuBatch(NamedTuple):
    """The tensors of a bucket that a GPU can copy at once."""

    tensors: tuple[UploadTensor, ...]
    copied: Callable[[int], torch.Tensor]
    """Returns a copy of the given size, uint8 on the GPU, laid out as in ``placed``, queued on the current stream."""
    plans: "BatchPlans"


class Bucket(NamedTuple):
    """Tensors that are converted together."""

    names: Sequence[str]
    read: Callable[[], Iterable[Named]]
    """Yields the tensors, one after the other. Called from a thread."""
    batch: GpuBatch | None = None
    """None: the tensors are converted one by one."""
    executor: Executor | None = None
    """Executor whose threads convert it; None: that of the conversion."""
    in_turns: bool = False
    """True if its threads take turns, except while they wait for a GPU."""


def coalesced(copies: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join consecutive copies whose sources and targets are equally far apart, with the bytes between them.

    Each copy is its source offset, its target offset, and its size in bytes.
    """
    source = target = nbytes = 0
    for from_, to, count in copies:
        if not count:
            continue
        if nbytes and from_ - source == to - target:
            nbytes = to - target + count
            continue
        if nbytes:
            yield source, target, nbytes
        source, target, nbytes = from_, to, count
    if nbytes:
        yield source, target, nbytes
