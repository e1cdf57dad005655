"""Store a batch of a trainer's tensors by its plan. The batch is copied to this process's GPU, converted, hashed there,
and copied to the log (see ``ingest/batched_store.py``)."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from rollout_service.gpu.grouped_copy import GroupedCopy
from rollout_service.gpu.streams import own_stream_of
from rollout_service.ingest.batch_plan import BatchPlan, Table
from rollout_service.ingest.sources.source import of_dtype
from rollout_service.model.convert import Converter, Named
from rollout_service.protocol.upload import UploadTensor, placed
from rollout_service.quant.cuda import GroupedQuantization
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.digests import Hashing
from rollout_service.quant.soundness import are_allowed
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.writer import VersionWriter


class PlannedBatch(NamedTuple):
    """The tensors of one bucket, and their plan."""

    tensors: tuple[UploadTensor, ...]
    plan: BatchPlan
    """Plan of these tensors."""
    copied: Callable[[int], torch.Tensor]
    """See ``GpuBatch.copied``."""

    def store(self, writer: VersionWriter, converter: Converter, gpu: torch.device, turn: threading.Lock) -> float:
        """Store all tensors. Return the time in seconds that it took to queue their conversion.

        Args:
            gpu: the CPU in Triton's interpreter.
            turn: held while this thread does not wait for the GPU; see ``BatchedStore``.

        Raises QuantizationError, as ``Converter.convert`` does; none of the batch counts as stored then.
        """
        plan, checks = self.plan, DeferredChecks()
        with own_stream_of(gpu) as stream:
            try:
                with turn:
                    began = time.perf_counter()
                    source = self.copied(plan.source_bytes)
                    made = _queue_conversion(plan, source, checks, lambda: self._complain(source, converter))
                    queued = time.perf_counter() - began
                    hashing = Hashing([_shifted(plan.chunks, made.data_ptr())], gpu)
                    hashing.queue(0)
                    for stretch in plan.stretches:
                        slot = torch.frombuffer(writer.stretch(*stretch[:3]), dtype=torch.uint8)
                        slot.copy_(made[stretch.made : stretch.made + stretch.nbytes], non_blocking=True)
                    hashing.collect()
                    require_sound = checks.collect()
            finally:  # no copy may still be running into a slot that is given up
                if stream is not None:
                    stream.synchronize()
            with turn:
                require_sound()
                writer.filled_and_hashed(plan.places, hashing.read(lambda number: _chunk(plan, writer, number)))
                for name in plan.empty:
                    writer.filled(name)
        return queued

    def _complain(self, source: torch.Tensor, converter: Converter) -> None:
        """Raise the error of an invalid tensor."""
        checks = DeferredChecks()
        for _ in converter.convert(self._views(source), to_cpu=False, checks=checks):
            pass
        checks.require()

    def _views(self, source: torch.Tensor) -> Iterator[Named]:
        for tensor, start in placed(self.tensors, 0):
            yield tensor.name, of_dtype(source[start : start + tensor.nbytes], tensor.dtype, tensor.shape)


def _queue_conversion(
    plan: BatchPlan, source: torch.Tensor, checks: DeferredChecks, complain: Callable[[], object]
) -> torch.Tensor:
    """Convert a batch, uint8, into a new output buffer, uint8 [``plan.made_bytes``]."""
    device = source.device
    made = torch.empty(plan.made_bytes, dtype=torch.uint8, device=device)
    came_at, made_at = source.data_ptr(), made.data_ptr()
    matrices = [(layout, _shifted(rows, came_at, made_at, made_at)) for layout, rows in plan.matrices]
    GroupedQuantization.at(matrices, device, power_of_two=plan.power_of_two, form=plan.form).run()
    for cast in plan.casts:
        comes, becomes = cast.comes.itemsize * cast.elements, cast.becomes.itemsize * cast.elements
        target = made[cast.made : cast.made + becomes].view(cast.becomes)
        target.copy_(source[cast.source : cast.source + comes].view(cast.comes))
    for copies, from_at in ((plan.copied, came_at), (plan.moved, made_at)):
        if len(copies):
            GroupedCopy(_shifted(copies, from_at, made_at), device).run()
    numbers = np.concatenate([_shifted(plan.came, came_at), _shifted(plan.scales, made_at)])
    checks.add(are_allowed(numbers, device), complain)
    return made


def _shifted(table: Table, *addresses: int) -> Table:
    """Return the table with these addresses added to its first columns."""
    shifted = table.copy()
    shifted[:, : len(addresses)] += np.array(addresses, np.int64)
    return shifted


def _chunk(plan: BatchPlan, writer: VersionWriter, number: int) -> memoryview:
    place, start = plan.chunk_of[number]
    return writer.slot(plan.places[place].name)[start : start + CHUNK_BYTES]
