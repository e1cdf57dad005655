"""The received parts of a delta, and the changes of each tensor in them (``protocol/delta_parts.py``)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollout_service.errors import InvalidDelta
from rollout_service.ingest.staged_parts import StagedParts
from rollout_service.protocol.delta_parts import PartHeader, decode_header, most_header_bytes
from rollout_service.protocol.upload import BeginUpload


class Change(NamedTuple):
    """The changes of one tensor in a part."""

    encoded: memoryview
    """The encoded changes, see ``protocol/delta.py``."""
    digest: str
    """Digest that the tensor must have after the change."""


class ReceivedChanges:
    """The changes in the received parts of one delta."""

    def __init__(self, parts: StagedParts, begin: BeginUpload) -> None:
        self._parts, self._begin = parts, begin
        self._names = [tensor.name for tensor in begin.tensors]
        self._part_of = {self._names[i]: part for part, tensors in enumerate(begin.delta_parts) for i in tensors}
        self._place_of = {self._names[i]: i - tensors.start for tensors in begin.delta_parts for i in tensors}
        self._headers: dict[int, PartHeader] = {}

    def add(self, part: int, nbytes: int) -> list[str]:
        """Read the header of a part of ``nbytes`` at its place. Return the tensors that the part covers.

        Raises InvalidDelta if the header is invalid, or the part covers other tensors than announced. Raises OSError.
        """
        tensors = self._begin.delta_parts[part]
        try:
            self._headers[part] = decode_header(
                self._parts.read(part, 0, min(nbytes, most_header_bytes(len(tensors)))),
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
        return [self._names[number] for number in tensors]

    def read(self, names: Sequence[str]) -> Iterator[Change | None]:
        """Yield the change of each of these tensors, None if unchanged. Their parts must have arrived. Raises
        OSError."""
        for name in names:
            part, place = self._part_of[name], self._place_of[name]
            header = self._headers[part]
            change = header.changes[place]
            if change is None:
                yield None
                continue
            encoded = self._parts.read(part, header.starts[place], change.nbytes)
            yield Change(encoded, change.digest)
