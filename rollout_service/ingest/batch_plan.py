"""What a GPU does to store a batch of a trainer's tensors, worked out once for all pushes.

A trainer pushes the same tensors at every step, and a mixture of experts has 20 000. What is launched for a batch of
them, and on which bytes, follows from their names, dtypes and shapes: only the addresses at which the batch is copied
to, and at which it becomes what is stored, differ from push to push. So a plan counts bytes from these two, in tables
of numpy, and a batch costs as much time as its launches, and not as its tensors.

What is stored is made where it needs no further copy on the GPU: side by side as it lies in the version's files, so
that a few copies bring it there. What must begin at other multiples than it does in a file is made beside that
(``aside``), and moved.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.errors import InvalidManifest
from rollout_service.model.convert import Becomes, Converter
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor, placed
from rollout_service.quant.cuda import ALIGNED_BYTES, MAX_MATRICES, Layout, layout_of
from rollout_service.quant.digests import chunks_of
from rollout_service.quant.formats import CODE_DTYPES
from rollout_service.quant.soundness import CODES, FINITE_SCALES, FINITE_WEIGHTS, Allowed, Numbers, scales, table_of
from rollout_service.ring import aligned
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.tensor_places import TensorPlace, neighbours

_MOST_TENSORS = 100_000
"""Of the plans that are kept: five times those of a 30B-A3B, 0.3 KB each."""

Table = npt.NDArray[np.int64]


class Stretch(NamedTuple):
    """Bytes of a file of the version, and where they are made."""

    file: str
    start: int
    """First byte in the file."""
    nbytes: int
    made: int
    """First byte in what is made."""


class Cast(NamedTuple):
    """A tensor that is stored in another dtype than it comes in."""

    source: int
    """First byte, as of all positions below, in the batch or in what is made."""
    made: int
    elements: int
    comes: torch.dtype
    becomes: torch.dtype


class _Part(NamedTuple):
    """A trainer's tensor or a part of it, which is stored as one tensor, or as codes and scales."""

    source: int
    comes: UploadTensor
    becomes: Becomes

    @property
    def elements(self) -> int:
        return math.prod(self.becomes.shape)

    @property
    def is_kept(self) -> bool:
        """Whether it is stored with the bytes that it comes with."""
        return self.comes.dtype == self.becomes.dtype


class BatchPlan:
    """Of one batch. Immutable."""

    def __init__(
        self, tensors: Sequence[UploadTensor], converter: Converter, places: Mapping[str, TensorPlace]
    ) -> None:
        """
        Args:
            tensors: as they lie in the trainer's memory, ``protocol.upload.placed``.
            places: where what they become is stored.

        Raises NotPlanned for tensors that have to be looked at one by one.
        """
        self.read_bytes = {tensor.name: tensor.nbytes for tensor in tensors}
        """By the trainer's names."""
        parts = list(_parts(tensors, converter, places))
        if not parts:
            raise NotPlanned("all of these tensors are ignored")
        stored = [places[name] for part in parts for name in _names(part)]
        *_, (last, start) = placed(tensors, 0)
        self.source_bytes = start + last.nbytes
        """Of the batch."""
        self.empty = [place.name for place in stored if not place.nbytes]
        """Tensors without an element."""
        self.places = sorted((place for place in stored if place.nbytes), key=lambda place: place[3:5])
        """Of all others, in the order of the files."""
        coded = frozenset(part.becomes.name for part in parts if part.becomes.scales is not None)
        self.stretches, made, end = _laid_out(self.places, coded)
        work = _Work(converter, made, end)
        for part in parts:
            work.add(part)
        self.made_bytes = work.end
        """Of what is made of it."""
        self.matrices: list[tuple[Layout, Table]] = work.matrices()
        """As ``GroupedQuantization.at`` takes them: weights in the batch, codes and scales in what is made."""
        self.casts = work.casts
        self.copied: Table = _table(work.copied)
        """[N, 3]: first bytes in the batch, and in what is made, and how many."""
        self.moved: Table = _table(work.moved)
        """Likewise within what is made, once that is there."""
        self.came: Table = table_of(work.came)
        """As ``soundness.are_allowed`` takes it: of the batch."""
        self.scales: Table = table_of(work.scales)
        """Likewise of what is made."""
        self.form, self.power_of_two = converter.form, converter.makes_powers_of_two
        nbytes = np.array([place.nbytes for place in self.places], np.int64)
        of_place, in_place, chunk_bytes = chunks_of(nbytes, CHUNK_BYTES)
        first = np.array([made[place.name] for place in self.places], np.int64)
        self.chunks: Table = np.stack([first[of_place] + in_place, chunk_bytes], axis=1)
        """[chunks, 2]: first byte in what is made, and bytes, of each chunk of ``places`` that has a digest."""
        self.chunk_of = list(zip(of_place.tolist(), in_place.tolist(), strict=True))
        """Of each: number of the place, and first byte in it."""


class NotPlanned(ValueError):
    """What is wrong with tensors, or unusual, is found out as they are converted one by one."""


class BatchPlans:
    """Those that were made, for one converter and layout. Threads may share it."""

    def __init__(self, converter: Converter, places: Mapping[str, TensorPlace]) -> None:
        self.converter, self._places = converter, places
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[tuple[UploadTensor, ...], BatchPlan | None]] = {}
        """By the first name, and the number of tensors; the one that was made last comes last."""

    def of(self, tensors: tuple[UploadTensor, ...]) -> BatchPlan | None:
        """Of these tensors, at least one; None: they are to be converted one by one."""
        key = (tensors[0].name, len(tensors))
        known = self._known.get(key)
        if known is not None and known[0] == tensors:  # takes no time where they are the very same
            return known[1]
        try:
            plan = BatchPlan(tensors, self.converter, self._places)
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
    """Of a part of a contiguous tensor."""
    if not part:
        return 0
    view = torch.empty(tensor.shape, dtype=torch.uint8, device="meta")[part]
    if not view.is_contiguous():
        raise NotPlanned(f"a part of {tensor.name} does not lie in one piece")
    return int(view.storage_offset()) * DTYPE_BYTES[tensor.dtype]


def _names(part: _Part) -> tuple[str, ...]:
    """What it is stored as."""
    name, made_scales = part.becomes.name, part.becomes.scales
    return (name,) if made_scales is None else (name, made_scales)


def _laid_out(places: Sequence[TensorPlace], coded: frozenset[str]) -> tuple[list[Stretch], dict[str, int], int]:
    """What is made, side by side as in the files: its stretches, the first byte of each tensor, and where it ends.

    ``coded``: tensors that are best made at multiples of ``ALIGNED_BYTES``. In files they mostly have one distance
    from these, and so each stretch begins where its first one is at a multiple.
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
    """What is to be done with the parts of a batch."""

    def __init__(self, converter: Converter, made: Mapping[str, int], end: int) -> None:
        """``made``: first byte of each tensor in what is made, which ends at ``end`` as far as it is stored."""
        self._converter, self._made, self.end = converter, made, end
        self._scale_numbers = scales(converter.largest_scale(), power_of_two=converter.makes_powers_of_two)
        self._matrices = defaultdict[Layout, list[tuple[int, int, int]]](list)
        self.casts: list[Cast] = []
        self.copied: list[tuple[int, int, int]] = []
        self.moved: list[tuple[int, int, int]] = []
        self.came: list[Numbers] = []
        self.scales: list[Numbers] = []

    def add(self, part: _Part) -> None:
        if not part.elements:
            return
        becomes = part.becomes
        if becomes.scales is not None:
            self._quantize(part, becomes.scales)
            return
        self.came.append(Numbers(part.source, part.elements, self._allowed(part)))
        itemsize = getattr(torch, becomes.dtype).itemsize
        if part.is_kept:
            self.copied.append((part.source, self._made[becomes.name], part.elements * itemsize))
            return
        made = self._place(becomes.name, part.elements * itemsize, itemsize)
        dtypes = getattr(torch, part.comes.dtype), getattr(torch, becomes.dtype)
        self.casts.append(Cast(part.source, made, part.elements, *dtypes))

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
        """Where to make a tensor that must begin at such a multiple."""
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
