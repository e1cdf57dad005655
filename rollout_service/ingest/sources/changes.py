"""The received parts of a delta, and the changes of each tensor in them (``protocol/delta_parts.py``)."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rollout_service.errors import InvalidDelta
from rollout_service.ingest.sources.parts import Arrival, left_behind, take_in
from rollout_service.ingest.sources.source import as_tensor
from rollout_service.model.convert import tensor_bytes
from rollout_service.protocol.delta_parts import PartHeader, decode_header, most_header_bytes
from rollout_service.protocol.upload import BeginUpload


class Change(NamedTuple):
    """The changes of one tensor in a part."""

    encoded: memoryview
    """The encoded changes, see ``protocol/delta.py``."""
    digest: str
    """Digest that the tensor must have after the change."""


class _Told(NamedTuple):
    """A received part."""

    digest: str
    uploader: str
    header: PartHeader
    path: Path
    nbytes: int
    data: memoryview | None
    """All bytes of the part; None: they are only in its file."""
    unconverted: int
    """Number of its tensors that are not yet converted."""


class ReceivedChanges:
    """The received parts of one delta; the counterpart of ``ReceivedParts``.

    Lives in the ingest's event loop, except ``read`` and ``converted``.
    """

    def __init__(self, folder: Path, begin: BeginUpload) -> None:
        self._folder, self._begin = folder, begin
        self.missing = set(range(len(begin.delta_parts)))
        """Numbers of the parts that have not arrived."""
        self._names = [tensor.name for tensor in begin.tensors]
        self._part_of = {self._names[i]: part for part, tensors in enumerate(begin.delta_parts) for i in tensors}
        self._place_of = {self._names[i]: i - tensors.start for tensors in begin.delta_parts for i in tensors}
        self._told: dict[int, _Told] = {}
        self._changing = threading.Lock()
        """Protects ``_told``."""

    @property
    def empty(self) -> list[str]:
        """Tensors that need no part. Always empty: the parts of a delta mention every tensor."""
        return []

    @property
    def digests(self) -> dict[int, str]:
        """Return the digests of the received parts."""
        return {part: told.digest for part, told in self._told.items()}

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all received parts."""
        return sum(told.nbytes for told in self._told.values())

    def came_from(self, part: int) -> str | None:
        """Return the uploader that sent the part; None if it has not arrived."""
        return self._told[part].uploader if part in self._told else None

    def left_behind(self) -> Iterator[tuple[int, str, Path]]:
        """See ``parts.left_behind``."""
        return left_behind(self._folder)

    def add(
        self, part: int, digest: str, received: Path, uploader: str = "", data: memoryview | None = None
    ) -> Arrival:
        """Take in a file as the whole part. ``data``: memory that begins with the same bytes, if they are still there.

        Raises InvalidDelta if its header is invalid, or it covers other tensors than announced.
        """
        tensors, nbytes = self._begin.delta_parts[part], received.stat().st_size
        try:
            header = decode_header(
                _begin_of(received, most_header_bytes(len(tensors))) if data is None else data[:nbytes],
                nbytes,
                tensors,
                [self._begin.tensors[number].nbytes for number in tensors],
            )
        except ValueError as error:
            assert self._begin.delta is not None
            raise InvalidDelta(
                f"version {self._begin.version}: part {part} of its changes since version {self._begin.delta.base} "
                f"cannot be read: {error}: push the whole version; the one before stays live",
                {"version": self._begin.version, "base": self._begin.delta.base, "part": part},
            ) from error
        path = take_in(self._folder, part, digest, received)
        with self._changing:
            before = self._told.get(part)
            self._told[part] = _Told(digest, uploader, header, path, nbytes, data, len(tensors))
        self.missing.discard(part)
        return Arrival([self._names[number] for number in tensors], None if before is None else before.path)

    def read(self, names: Sequence[str]) -> Iterator[Change | None]:
        """Yield the change of each of these tensors, None if unchanged. Their parts must have arrived. Raises
        OSError."""
        for name in names:
            told, place = self._told[self._part_of[name]], self._place_of[name]
            change = told.header.changes[place]
            if change is None:
                yield None
                continue
            yield Change(_piece(told, told.header.starts[place], change.nbytes), change.digest)

    def converted(self, names: Sequence[str]) -> None:
        """Note that these tensors are no longer read; a part leaves memory once none of its tensors is needed."""
        with self._changing:
            for part, count in Counter(self._part_of[name] for name in names).items():
                told = self._told[part]
                left = told.unconverted - count
                self._told[part] = told._replace(unconverted=left, data=told.data if left > 0 else None)


def _begin_of(path: Path, nbytes: int) -> memoryview:
    with path.open("rb") as file:
        return memoryview(file.read(nbytes))


def _piece(told: _Told, start: int, nbytes: int) -> memoryview:
    if told.data is not None:
        # it keeps all of the memory alive, which the ``BufferPool`` gets back when nothing refers to it
        return tensor_bytes(as_tensor(told.data, "int8", (nbytes,), start))
    with told.path.open("rb") as file:
        found = os.pread(file.fileno(), nbytes, start)
    if len(found) != nbytes:
        raise OSError(f"{told.path} is shorter than when it came")
    return memoryview(found)
