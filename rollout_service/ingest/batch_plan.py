"""Plan of the GPU work for storing a batch of tensors, computed once and used for all pushes.

The batch is copied to this process's GPU, converted, hashed there, and copied to the log.

A trainer pushes the same tensors at every step, 20 000 for a mixture of experts. Their names, dtypes and shapes decide
which kernels run on which bytes. Only two addresses differ between pushes: that of the received batch, and that of the
output buffer. A plan therefore holds offsets from these two, in numpy tables. The time for a batch then depends on its
kernel launches, not on its number of tensors.

Tensors are produced in the output buffer in the same order and at the same distances as in the version's files, so that
a few copies write them. A tensor whose alignment there is wrong for its kernel is produced at the end of the buffer
(``aside``), and moved.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.errors import InvalidManifest
from rollout_service.gpu.grouped_copy import GroupedCopy
from rollout_service.gpu.streams import own_stream_of
from rollout_service.ingest.sources.source import of_dtype
from rollout_service.model.convert import Becomes, Converter
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor, placed
from rollout_service.quant.cuda import ALIGNED_BYTES, MAX_MATRICES, GroupedQuantization, Layout, layout_of
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.digests import Hashing, chunks_of
from rollout_service.quant.formats import CODE_DTYPES
from rollout_service.quant.soundness import (
    CODES,
    FINITE_SCALES,
    FINITE_WEIGHTS,
    Allowed,
    Numbers,
    are_allowed,
    scales,
    table_of,
)
from rollout_service.store.layout import TensorPlace, neighbours
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.writer import VersionWriter

_MOST_TENSORS = 100_000
"""Maximum number of tensors in all kept plans: five times those of a 30B-A3B, at 0.3 KB each."""

Table = npt.NDArray[np.int64]


class Stretch(NamedTuple):
    """A range of bytes in a file of the version, and its offset in the output buffer."""

    file: str
    start: int
    """Offset in the file, in bytes."""
    nbytes: int
    made: int
    """Offset in the output buffer, in bytes."""


class Cast(NamedTuple):
    """A tensor that is stored in another dtype than it is received in."""

    source: int
    """Offset in bytes, like all positions below, in the batch or in the output buffer."""
    made: int
    elements: int
    comes: torch.dtype
    becomes: torch.dtype


class _Part(NamedTuple):
    """A trainer's tensor or a part of it. It is stored as one tensor, or as codes and scales."""

    source: int
    comes: UploadTensor
    becomes: Becomes


class BatchPlan:
    """The work for one batch. Immutable."""

    def __init__(
        self, tensors: Sequence[UploadTensor], converter: Converter, places: Mapping[str, TensorPlace]
    ) -> None:
        """
        Args:
            tensors: the batch, in the order of the trainer's memory, ``protocol.upload.placed``.
            places: where the stored tensors lie in the version's files.

        Raises NotPlanned for tensors that must be converted one by one.
        """
        self._tensors, self._converter = tensors, converter
        self.read_bytes = {tensor.name: tensor.nbytes for tensor in tensors}
        """Size in bytes of each tensor, by the trainer's names."""
        parts = list(_parts(tensors, converter, places))
        if not parts:
            raise NotPlanned("all of these tensors are ignored")
        names = [name for part in parts for name in (part.becomes.name, part.becomes.scales) if name is not None]
        stored = [places[name] for name in names]
        *_, (last, start) = placed(tensors, 0)
        self.source_bytes = start + last.nbytes
        """Size of the batch in bytes."""
        self.empty = [place.name for place in stored if not place.nbytes]
        """Tensors without elements."""
        self.places = sorted((place for place in stored if place.nbytes), key=lambda place: place[3:5])
        """Places of all other tensors, in the order of the files."""
        coded = frozenset(part.becomes.name for part in parts if part.becomes.scales is not None)
        self.stretches, made, end = _laid_out(self.places, coded)
        work = _Work(converter, made, end)
        for part in parts:
            work.add(part)
        self.made_bytes = work.end
        """Size of the output buffer in bytes."""
        self.matrices: list[tuple[Layout, Table]] = work.matrices()
        """Arguments of ``GroupedQuantization.at``: weights in the batch, codes and scales in the output buffer."""
        self.casts = work.casts
        self.copied: Table = _table(work.copied)
        """[N, 3]: offset in the batch, offset in the output buffer, and size, in bytes."""
        self.moved: Table = _table(work.moved)
        """The same for copies within the output buffer, after conversion."""
        self.came: Table = table_of(work.came)
        """Argument of ``soundness.are_allowed``: numbers in the batch."""
        self.scales: Table = table_of(work.scales)
        """The same for numbers in the output buffer."""
        nbytes = np.array([place.nbytes for place in self.places], np.int64)
        of_place, in_place, chunk_bytes = chunks_of(nbytes, CHUNK_BYTES)
        first = np.array([made[place.name] for place in self.places], np.int64)
        self.chunks: Table = np.stack([first[of_place] + in_place, chunk_bytes], axis=1)
        """[chunks, 2]: offset in the output buffer and size in bytes of each chunk of ``places`` that has a digest."""
        self.chunk_of = list(zip(of_place.tolist(), in_place.tolist(), strict=True))
        """Number of the place and offset in it, for each chunk."""

    def store(
        self, copied: Callable[[int], torch.Tensor], writer: VersionWriter, gpu: torch.device, turn: threading.Lock
    ) -> float:
        """Store all tensors. Return the time in seconds that it took to queue their conversion.

        Args:
            copied: see ``GpuBatch.copied``.
            gpu: the CPU in Triton's interpreter.
            turn: held while this thread does not wait for the GPU; see ``BatchedStore``.

        Raises QuantizationError, as ``Converter.convert`` does; none of the batch counts as stored then.
        """
        checks = DeferredChecks()
        with own_stream_of(gpu) as stream:
            try:
                with turn:
                    began = time.perf_counter()
                    source = copied(self.source_bytes)
                    made = self._queue_conversion(source, checks)
                    queued_s = time.perf_counter() - began
                    hashing = Hashing([_shifted(self.chunks, made.data_ptr())], gpu)
                    hashing.queue(0)
                    for file, start, nbytes, first in self.stretches:
                        slot = torch.frombuffer(writer.stretch(file, start, nbytes), dtype=torch.uint8)
                        slot.copy_(made[first : first + nbytes], non_blocking=True)
                    hashing.collect()
                    require_sound = checks.collect()
            finally:  # no copy may still be running into a slot that is given up
                if stream is not None:
                    stream.synchronize()

            def chunk(number: int) -> memoryview:
                place, start = self.chunk_of[number]
                return writer.slot(self.places[place].name)[start : start + CHUNK_BYTES]

            with turn:
                require_sound()
                writer.filled_and_hashed(self.places, hashing.read(chunk))
                for name in self.empty:
                    writer.filled(name)
        return queued_s

    def _queue_conversion(self, source: torch.Tensor, checks: DeferredChecks) -> torch.Tensor:
        """Convert a batch, uint8, into a new output buffer, uint8 [``made_bytes``]."""
        device = source.device
        made = torch.empty(self.made_bytes, dtype=torch.uint8, device=device)
        came_at, made_at = source.data_ptr(), made.data_ptr()
        matrices = [(layout, _shifted(rows, came_at, made_at, made_at)) for layout, rows in self.matrices]
        power_of_two, form = self._converter.makes_powers_of_two, self._converter.form
        GroupedQuantization.at(matrices, device, power_of_two=power_of_two, form=form).run()
        for cast in self.casts:
            comes, becomes = cast.comes.itemsize * cast.elements, cast.becomes.itemsize * cast.elements
            target = made[cast.made : cast.made + becomes].view(cast.becomes)
            target.copy_(source[cast.source : cast.source + comes].view(cast.comes))
        for copies, from_at in ((self.copied, came_at), (self.moved, made_at)):
            if len(copies):
                GroupedCopy(_shifted(copies, from_at, made_at), device).run()

        def complain() -> None:
            """Raise the error of an invalid tensor."""
            one_by_one = DeferredChecks()
            views = (
                (tensor.name, of_dtype(source[start : start + tensor.nbytes], tensor.dtype, tensor.shape))
                for tensor, start in placed(self._tensors, 0)
            )
            for _ in self._converter.convert(views, to_cpu=False, checks=one_by_one):
                pass
            one_by_one.require()

        numbers = np.concatenate([_shifted(self.came, came_at), _shifted(self.scales, made_at)])
        checks.add(are_allowed(numbers, device), complain)
        return made


class NotPlanned(ValueError):
    """Raised for unusual or invalid tensors, which are then converted one by one; this reports errors in detail."""


class BatchPlans:
    """Cache of the plans of one converter and layout. Thread-safe."""

    def __init__(self, converter: Converter, places: Mapping[str, TensorPlace]) -> None:
        self._converter, self._places = converter, places
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[tuple[UploadTensor, ...], BatchPlan | None]] = {}
        """Plans by first tensor name and number of tensors; ordered from oldest to newest."""

    def of(self, tensors: tuple[UploadTensor, ...]) -> BatchPlan | None:
        """Return the plan for these tensors, at least one; None if they must be converted one by one."""
        key = (tensors[0].name, len(tensors))
        known = self._known.get(key)
        if known is not None and known[0] == tensors:  # comparing takes no time if these are the same objects
            return known[1]
        try:
            plan = BatchPlan(tensors, self._converter, self._places)
        except NotPlanned:
            plan = None
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = (tensors, plan)
            while sum(count for _, count in self._known) > _MOST_TENSORS and len(self._known) > 1:
                del self._known[next(iter(self._known))]
        return plan


def _parts(tensors: Iterable[UploadTensor], converter: Converter, places: Mapping[str, TensorPlace]) -> Iterable[_Part]:
    for tensor, start in placed(tensors, 0):
        try:
            made = list(converter.becomes(tensor))
        except (InvalidManifest, ValueError) as error:
            raise NotPlanned(str(error)) from error
        for becomes in made:
            place = places.get(becomes.name)
            if place is None or (place.dtype, place.shape) != (becomes.dtype, becomes.shape):
                raise NotPlanned(f"{tensor.name} becomes {becomes.dtype} {list(becomes.shape)}, which has no place")
            yield _Part(start + _first_byte(tensor, becomes.part), tensor, becomes)


def _first_byte(tensor: UploadTensor, part: tuple[int | slice, ...]) -> int:
    """Return the offset in bytes of a part of a contiguous tensor."""
    if not part:
        return 0
    view = torch.empty(tensor.shape, dtype=torch.uint8, device="meta")[part]
    if not view.is_contiguous():
        raise NotPlanned(f"a part of {tensor.name} does not lie in one piece")
    return int(view.storage_offset()) * DTYPE_BYTES[tensor.dtype]


def _laid_out(places: Sequence[TensorPlace], coded: frozenset[str]) -> tuple[list[Stretch], dict[str, int], int]:
    """Lay out the output buffer like the files. Return its ranges, the offset of each tensor, and its size.

    ``coded``: tensors that should begin at multiples of ``ALIGNED_BYTES``. In files, most of them have the same offset
    from such a multiple, so each range is placed such that its first one is aligned.
    """
    stretches: list[Stretch] = []
    made: dict[str, int] = {}
    end = taken = 0
    for count, file, start, file_end in neighbours(places):
        several = places[taken : (taken := taken + count)]
        first = next((place.offset - start for place in several if place.name in coded), 0)
        begin = aligned(end) + -first % ALIGNED_BYTES
        made |= {place.name: begin + place.offset - start for place in several}
        stretches.append(Stretch(file, start, file_end - start, begin))
        end = begin + file_end - start
    return stretches, made, end


class _Work:
    """Collects the GPU work for the parts of a batch."""

    def __init__(self, converter: Converter, made: Mapping[str, int], end: int) -> None:
        """``made``: offset of each tensor in the output buffer. ``end``: size of the buffer's part that is stored."""
        self._converter, self._made, self.end = converter, made, end
        self._scale_numbers = scales(converter.largest_scale(), power_of_two=converter.makes_powers_of_two)
        self._matrices = defaultdict[Layout, list[tuple[int, int, int]]](list)
        self.casts: list[Cast] = []
        self.copied: list[tuple[int, int, int]] = []
        self.moved: list[tuple[int, int, int]] = []
        self.came: list[Numbers] = []
        self.scales: list[Numbers] = []

    def add(self, part: _Part) -> None:
        becomes = part.becomes
        elements = math.prod(becomes.shape)
        if not elements:
            return
        if becomes.scales is not None:
            self._quantize(part, becomes.scales)
            return
        self.came.append(Numbers(part.source, elements, self._allowed(part)))
        comes, stored = getattr(torch, part.comes.dtype), getattr(torch, becomes.dtype)
        nbytes = elements * stored.itemsize
        if comes == stored:
            self.copied.append((part.source, self._made[becomes.name], nbytes))
            return
        made = self._place(becomes.name, nbytes, stored.itemsize)
        self.casts.append(Cast(part.source, made, elements, comes, stored))

    def matrices(self) -> list[tuple[Layout, Table]]:
        return [
            (layout, _table(rows[first : first + MAX_MATRICES]))
            for layout, rows in self._matrices.items()
            for first in range(0, len(rows), MAX_MATRICES)
        ]

    def _quantize(self, part: _Part, scale_name: str) -> None:
        rows, columns = part.becomes.shape
        scale_count = math.prod(self._converter.form.scale_shape((rows, columns)))
        codes = self._place(part.becomes.name, rows * columns, ALIGNED_BYTES)
        made_scales = self._place(scale_name, 4 * scale_count, 4)
        layout = layout_of((rows, columns), (columns, 1), getattr(torch, part.comes.dtype), part.source, codes)
        self._matrices[layout].append((part.source, codes, made_scales))
        self.scales.append(Numbers(made_scales, scale_count, FINITE_SCALES))

    def _place(self, name: str, nbytes: int, alignment: int) -> int:
        """Return an offset for a tensor that must begin at a multiple of ``alignment``."""
        made = self._made[name]
        if made % alignment == 0:
            return made
        aside = aligned(self.end)
        self.end = aside + nbytes
        self.moved.append((aside, made, nbytes))
        return aside

    def _allowed(self, part: _Part) -> Allowed:
        dtype, name = part.comes.dtype, part.becomes.name
        if dtype in CODE_DTYPES:
            return CODES[dtype]
        if not self._converter.makes_scales(name):
            return FINITE_WEIGHTS[dtype]
        if dtype != "float32":
            raise NotPlanned(f"{name} are scales, and come as {dtype}")
        return self._scale_numbers


def _table(rows: Sequence[tuple[int, int, int]]) -> Table:
    return np.array(rows, np.int64).reshape(-1, 3)


def _shifted(table: Table, *addresses: int) -> Table:
    """Return the table with these addresses added to its first columns."""
    shifted = table.copy()
    shifted[:, : len(addresses)] += np.array(addresses, np.int64)
    return shifted
