"""Names, dtypes, shapes and places of a version's tensors, the same for every version of a model and quantization.

A mixture of experts has 40 000 tensors, and values derived from these take tenths of a second to compute. All versions
of a process in which they are equal therefore share one object, which caches them. Needs no torch.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from rollout_service.protocol.tensors import StoredDtype, TensorSlot
from rollout_service.protocol.upload import SourceDtype
from rollout_service.runtime.groups import groups_of

_SAFETENSORS_DTYPE: dict[SourceDtype, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
}


class TensorPlace(NamedTuple):
    """Name, dtype, shape and place of a tensor in a version."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    file: str
    offset: int
    """Offset in that file, in bytes."""
    nbytes: int


class Neighbours(NamedTuple):
    """A contiguous range of tensors in a file."""

    tensors: int
    """Number of tensors."""
    file: str
    start: int
    """Offset of the first tensor, in bytes."""
    end: int
    """Offset of the end of the last tensor, in bytes."""


def neighbours(places: Iterable[TensorPlace]) -> Iterator[Neighbours]:
    """Coalesce tensors, in their order, into contiguous ranges of files."""
    count, file, start, end = 0, "", 0, 0
    for _, _, _, here, offset, nbytes in places:
        if count and (offset != end or here != file):
            yield Neighbours(count, file, start, end)
            count = 0
        if not count:
            file, start = here, offset
        count += 1
        end = offset + nbytes
    if count:
        yield Neighbours(count, file, start, end)


class Slot(Protocol):
    """A tensor that has, or will have, a place."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> SourceDtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Placed(Slot, Protocol):
    """A tensor with a place: a ``TensorPlace``, or a ``StoredTensor``."""

    @property
    def dtype(self) -> StoredDtype: ...
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...


class FileHeader(NamedTuple):
    """Header of a safetensors file."""

    text: bytes
    """The first bytes of the file. Those of its tensors follow, without gaps."""
    data_bytes: int
    """Size in bytes of the tensors after it."""


class TensorPlaces:
    """Places of a version's tensors, in the order of its manifest."""

    def __init__(self, tensors: Iterable[Placed]) -> None:
        """Raises ValueError if two tensors have the same name."""
        self._places = tuple(TensorPlace(t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes) for t in tensors)
        names: set[str] = set()
        for place in self._places:
            if place.name in names:
                raise ValueError(f"tensor {place.name} occurs twice: give each tensor one name")
            names.add(place.name)

    @classmethod
    def of(cls, tensors: Sequence[Placed]) -> "TensorPlaces":
        """Return an equal object of this process, or a new one. Raises ValueError like the constructor."""
        for known in tuple(_known):  # a copy, since another thread may add to it
            if known.are_those_of(tensors):
                return known
        places = cls(tensors)
        _known.append(places)
        return places

    def are_those_of(self, tensors: Sequence[Placed]) -> bool:
        """Return True if these have the same names, dtypes, shapes and places, in the same order."""
        if len(tensors) != len(self._places):
            return False
        for t, place in zip(tensors, self._places, strict=True):  # `all` of a generator takes 50% longer
            if (t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes) != place:
                return False
        return True

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the tensors, in the order of the files and of their offsets."""
        by_place = sorted(range(len(self._places)), key=lambda number: self._places[number][3:5])
        return tuple(by_place)

    @cached_property
    def is_in_order(self) -> bool:
        """True if the manifest has the tensors in the order of the files."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def files(self) -> dict[str, slice]:
        """Names of the files, in order, with the slice of ``order`` that each of them holds."""
        first: dict[str, int] = {}
        for count, number in enumerate(self.order):
            first.setdefault(self._places[number].file, count)
        ends = [*first.values(), len(self.order)][1:]
        return {file: slice(start, end) for (file, start), end in zip(first.items(), ends, strict=True)}

    @cached_property
    def headers(self) -> dict[str, FileHeader]:
        """Header of each file."""
        return {
            file: safetensors_header(self._places[number] for number in self.order[part])
            for file, part in self.files.items()
        }

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(place.nbytes for place in self._places)

    @cached_property
    def digest(self) -> bytes:
        """Digest that is equal for versions whose tensors have the same places, whatever the order of their
        manifests."""
        digest = hashlib.sha256()
        for number in self.order:
            name, dtype, shape, file, offset, _ = self._places[number]
            digest.update(f"{name} {dtype} {list(shape)} {file} {offset}\n".encode())
        return digest.digest()

    @cached_property
    def slots_digest(self) -> str:
        """Digest that is equal for versions with the same names, dtypes and shapes, whatever their places in files."""
        digest = hashlib.sha256()
        for number in self._by_name:
            place = self._places[number]
            digest.update(f"{place.name} {place.dtype} {place.shape}\n".encode())
        return digest.hexdigest()

    def with_digests_as_json(self, digests: Sequence[str]) -> str:
        """Return ``[[name, dtype, shape, digest], …]``, sorted, as ``json.dumps`` writes it.

        ``digests``: digests of the tensors, in the order of the manifest.
        """
        together = "".join(digests)
        if json.dumps(together) != f'"{together}"':  # never true of real digests, but a manifest may contain any text
            digests = [json.dumps(digest)[1:-1] for digest in digests]
        texts = [""] * (2 * len(digests) + 1)
        texts[::2] = self._around_digests
        texts[1::2] = [digests[number] for number in self._by_name]
        return "".join(texts)

    @cached_property
    def _by_name(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self._places)), key=lambda number: self._places[number].name))

    @cached_property
    def _around_digests(self) -> list[str]:
        """Text of ``with_digests_as_json`` before, between and after the digests."""
        if not self._places:
            return ["[]"]
        begins = []
        for number in self._by_name:
            name, dtype, shape, *_ = self._places[number]
            begins.append(f'[{json.dumps(name)}, "{dtype}", {list(shape)}, "')
        return [f"[{begins[0]}", *(f'"], {begin}' for begin in begins[1:]), '"]]']


_known: deque[TensorPlaces] = deque(maxlen=4)
"""Recent objects: of a service's versions, and of its unquantized ones. A few more, so that looking at a log of another
model does not evict them."""


def safetensors_header(tensors: Iterable[Slot]) -> FileHeader:
    """Return the header of a file with these tensors. Format: https://github.com/huggingface/safetensors#format"""
    entries, position = {}, 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        entries[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPE[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return FileHeader(len(text).to_bytes(8, "little") + text, position)


MAX_FILE_BYTES = 1 << 30
"""Maximum file size in bytes. Linux lets one thread at a time write into a file, so several threads need several
files."""


class LaidOutFile(NamedTuple):
    """A file with its header and space for its tensors."""

    name: str
    header: bytes
    nbytes: int
    """Size in bytes, including the header."""


class Layout:
    """Layout of ``slots``, in order, in files of at most ``max_file_bytes``; a larger tensor has a file of its own.

    Computing it takes 20 µs per tensor, 0.7 s for the 37 000 of a 30B-A3B, so it is done once for all versions.
    """

    def __init__(self, slots: Iterable[TensorSlot], max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.places: dict[str, TensorPlace] = {}
        """Places by tensor name, in the order of the files."""
        self.files: list[LaidOutFile] = []
        for number, group in enumerate(groups_of(slots, lambda slot: slot.nbytes, max_file_bytes), start=1):
            name = f"weights-{number:05d}.safetensors"
            header, data_bytes = safetensors_header(group)
            self.files.append(LaidOutFile(name, header, len(header) + data_bytes))
            offset = len(header)
            for slot in group:
                place = TensorPlace(slot.name, slot.dtype, slot.shape, name, offset, slot.nbytes)
                self.places[slot.name] = place
                offset += place.nbytes

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(place.nbytes for place in self.places.values())

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Index of each tensor in the order of the files."""
        return {name: number for number, name in enumerate(self.places)}

    @cached_property
    def digest(self) -> bytes:
        """``TensorPlaces.digest``."""
        return TensorPlaces.of(tuple(self.places.values())).digest
