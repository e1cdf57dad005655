"""What the tensors of a version are and where they lie: the same for every version of a model that is quantized alike.

A mixture of experts has 40 000 of them, and what follows from their names, dtypes, shapes and places takes tenths of a
second to compute. So all versions of a process that agree in these share one object, which keeps it. Needs no torch.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from rollout_service.protocol.tensors import StoredDtype

_SAFETENSORS_DTYPE: dict[StoredDtype, str] = {
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
}


class TensorPlace(NamedTuple):
    """Where a tensor lies in a version, and as what."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    file: str
    offset: int
    """First byte in that file."""
    nbytes: int


class Neighbours(NamedTuple):
    """Tensors that follow one another in a file."""

    tensors: int
    """How many."""
    file: str
    start: int
    """The first one's first byte."""
    end: int
    """One past the last one's last."""


def neighbours(places: Iterable[TensorPlace]) -> Iterator[Neighbours]:
    """All of these tensors, in their order: as many as follow one another are one."""
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
    def dtype(self) -> StoredDtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Placed(Slot, Protocol):
    """A tensor that has one: a ``TensorPlace``, or a ``StoredTensor``."""

    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...


class FileHeader(NamedTuple):
    """Of a safetensors file."""

    text: bytes
    """The first bytes of the file: those of its tensors follow, one after the other."""
    data_bytes: int
    """How many follow."""


class TensorPlaces:
    """Of the tensors of a version, in the order of its manifest."""

    def __init__(self, tensors: Iterable[Placed]) -> None:
        """Raises ValueError if two of them have the same name."""
        self._places = tuple(TensorPlace(t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes) for t in tensors)
        names: set[str] = set()
        for place in self._places:
            if place.name in names:
                raise ValueError(f"tensor {place.name} is there twice")
            names.add(place.name)

    @classmethod
    def of(cls, tensors: Sequence[Placed]) -> "TensorPlaces":
        """An object that this process has already, if one is known that is equal. Raises as the constructor does."""
        for known in tuple(_known):  # another thread may add to it meanwhile
            if known.are_those_of(tensors):
                return known
        places = cls(tensors)
        _known.append(places)
        return places

    def are_those_of(self, tensors: Sequence[Placed]) -> bool:
        """Whether these have the same names, dtypes, shapes and places, in the same order."""
        if len(tensors) != len(self._places):
            return False
        for t, place in zip(tensors, self._places, strict=True):  # `all` of a generator takes half as long again
            if (t.name, t.dtype, t.shape, t.file, t.offset, t.nbytes) != place:
                return False
        return True

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of the tensors, in the order of the files, and in each of their offsets."""
        by_place = sorted(range(len(self._places)), key=lambda number: self._places[number][3:5])
        return tuple(by_place)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the manifest has the tensors in the order of the files."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def files(self) -> dict[str, slice]:
        """Names of the files, in order, and which tensors of ``order`` each of them holds."""
        first: dict[str, int] = {}
        for count, number in enumerate(self.order):
            first.setdefault(self._places[number].file, count)
        ends = [*first.values(), len(self.order)][1:]
        return {file: slice(start, end) for (file, start), end in zip(first.items(), ends, strict=True)}

    @cached_property
    def headers(self) -> dict[str, FileHeader]:
        """Of each file."""
        return {
            file: safetensors_header(self._places[number] for number in self.order[part])
            for file, part in self.files.items()
        }

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(place.nbytes for place in self._places)

    @cached_property
    def digest(self) -> bytes:
        """Equal for versions whose tensors lie at the same places, whatever the order of their manifests."""
        digest = hashlib.sha256()
        for number in self.order:
            name, dtype, shape, file, offset, _ = self._places[number]
            digest.update(f"{name} {dtype} {list(shape)} {file} {offset}\n".encode())
        return digest.digest()

    @cached_property
    def slots_digest(self) -> str:
        """Equal for versions of equal names, dtypes and shapes, wherever they lie in their files."""
        digest = hashlib.sha256()
        for number in self._by_name:
            place = self._places[number]
            digest.update(f"{place.name} {place.dtype} {place.shape}\n".encode())
        return digest.hexdigest()

    def with_digests_as_json(self, digests: Sequence[str]) -> str:
        """``[[name, dtype, shape, digest], …]``, sorted, as ``json.dumps`` writes it.

        ``digests``: of the tensors, in the order of the manifest.
        """
        together = "".join(digests)
        if json.dumps(together) != f'"{together}"':  # no digest needs that, but a manifest may have anything
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
        """What ``with_digests_as_json`` has before, between and after the digests."""
        if not self._places:
            return ["[]"]
        begins = []
        for number in self._by_name:
            name, dtype, shape, *_ = self._places[number]
            begins.append(f'[{json.dumps(name)}, "{dtype}", {list(shape)}, "')
        return [f"[{begins[0]}", *(f'"], {begin}' for begin in begins[1:]), '"]]']


_known: deque[TensorPlaces] = deque(maxlen=4)
"""Of a service's versions, and of its unquantized ones; some more, so that a log of another model does not push them
out while it is looked at."""


def safetensors_header(tensors: Iterable[Slot]) -> FileHeader:
    """Of a file of these tensors. Format: https://github.com/huggingface/safetensors#format"""
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
