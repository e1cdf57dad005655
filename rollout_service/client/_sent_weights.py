"""What a client has sent last, in host memory, and what the next weights change in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rollout_service.model.convert import Named, tensor_bytes
from rollout_service.protocol import delta
from rollout_service.protocol.base import NEXT, NewVersion
from rollout_service.protocol.upload import DTYPE_BYTES, Delta, TensorChange, UploadTensor, base_digest
from rollout_service.store.manifest import tensor_digests
from rollout_service.threads import in_threads, io_threads

LARGEST_SHARE = 1 / 8
"""Of a version's bytes that its delta may have: to make and apply a larger one takes about as long as to send all."""
_COMPARED_AT_ONCE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Changed:
    """One tensor that is not what it was."""

    encoded: bytes
    """What changed, see ``rollout_service.protocol.delta``."""
    digest: str
    """That the tensor has now, as ``StoredTensor.digest``."""


Changes = list[Changed | None]
"""Of each tensor of a table, in its order; None: it is what it was."""


def nbytes_of(changes: Changes) -> int:
    """What they have to be sent."""
    return sum(len(changed.encoded) for changed in changes if changed is not None)


class SentWeights:
    """The tensors of one version, as they are stored. For one thread at a time."""

    def __init__(self, table: tuple[UploadTensor, ...]) -> None:
        self.table = table
        self.version: int | None = None
        """Which it is; None: none that is known to be committed."""
        self._newer: tuple[int, Changes] | None = None
        self._data = {tensor.name: np.empty(tensor.nbytes, np.uint8).data for tensor in table}
        self._digests: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.table)

    def may_be_base_of(self, version: NewVersion, table: tuple[UploadTensor, ...]) -> bool:
        """Whether ``version``, with tensors as of ``table``, may be pushed as a delta of this one."""
        return table == self.table and self.version is not None and (version == NEXT or self.version < version)

    def take(self, stored: Iterable[Named]) -> Iterator[memoryview]:
        """Become these tensors, one after the other; yields the bytes of each."""
        self.version = self._newer = None
        for name, tensor in stored:
            self._data[name][:] = tensor_bytes(tensor)
            del tensor
            yield self._hashed(name)

    def stream(self) -> Iterator[memoryview]:
        """The bytes of each tensor."""
        for tensor in self.table:
            yield self._hashed(tensor.name)

    def changes_to(self, stored: Iterable[Named]) -> Changes | None:
        """What makes these tensors ``stored``, which has the same names, dtypes and shapes in the same order.

        None if it has more than ``LARGEST_SHARE`` of their bytes: these are ``stored`` then, and no version.
        """
        changes: Changes = []
        waiting: deque[tuple[int, Callable[[], Changed | None]]] = deque()
        rest, waiting_bytes = zip(self.table, stored, strict=True), 0
        changed_bytes, most_bytes = 0, LARGEST_SHARE * self.nbytes
        with ThreadPoolExecutor(io_threads(), "delta") as pool:
            for tensor, (_, new) in rest:
                waiting.append((tensor.nbytes, self._compare(tensor, tensor_bytes(new), pool)))
                waiting_bytes += tensor.nbytes
                del new
                while waiting and waiting_bytes > _COMPARED_AT_ONCE_BYTES:
                    nbytes, found = waiting.popleft()
                    waiting_bytes -= nbytes
                    changes.append(found())
                    changed_bytes += nbytes_of(changes[-1:])
                if changed_bytes > most_bytes:
                    break
            changes += [found() for _, found in waiting]
        if nbytes_of(changes) <= most_bytes and len(changes) == len(self.table):
            return changes
        self.change(changes)
        for tensor, (_, new) in rest:
            self._data[tensor.name][:] = tensor_bytes(new)
            del new
        return None

    def announced(self, changes: Changes) -> Delta:
        """``changes`` of this version, as they are announced."""
        assert self.version is not None, "of a version that is not committed there is no delta"
        return Delta(
            base=self.version,
            base_digest=base_digest(self._digests[tensor.name] for tensor in self.table),
            changes=tuple(_announced(changed) for changed in changes),
        )

    def change(self, changes: Changes) -> None:
        """Become what ``changes`` make of these tensors, or of the first of them; it is no version yet."""
        self.version = self._newer = None
        list(in_threads(lambda each: self._change(*each), zip(self.table, changes, strict=False)))

    def note_newer(self, version: int, changes: Changes) -> None:
        """A delta of this version was committed as ``version``."""
        self._newer = version, changes

    def become_newer(self, pushed: NewVersion) -> None:
        """Become the version that was committed last, unless it is pushed again: that must be the same delta again."""
        if self._newer is not None and self._newer[0] != pushed:
            version, changes = self._newer
            self.change(changes)
            self.version = version

    def _compare(self, tensor: UploadTensor, new: memoryview, pool: ThreadPoolExecutor) -> Callable[[], Changed | None]:
        """What waits for the comparison. One task a tensor, of which there may be 40 000; several if it is large."""
        old, itemsize = self._data[tensor.name], DTYPE_BYTES[tensor.dtype]
        if tensor.nbytes <= delta.SEGMENT_BYTES:
            return pool.submit(lambda: _changed(delta.encode(old, new, itemsize), lambda: _digest(new))).result
        parts = delta.segments(tensor.nbytes)
        encoded = [pool.submit(delta.encode_segment, old[part], new[part], itemsize) for part in parts]
        digest = pool.submit(_digest, new)
        return lambda: _changed(delta.joined([segment.result() for segment in encoded]), digest.result)

    def _change(self, tensor: UploadTensor, changed: Changed | None) -> None:
        if changed is not None:
            delta.apply(memoryview(changed.encoded), self._data[tensor.name], DTYPE_BYTES[tensor.dtype])
            self._digests[tensor.name] = changed.digest

    def _hashed(self, name: str) -> memoryview:
        self._digests[name] = _digest(self._data[name])
        return self._data[name]


def _announced(changed: Changed | None) -> TensorChange | None:
    return None if changed is None else TensorChange(nbytes=len(changed.encoded), digest=changed.digest)


def _changed(encoded: bytes, digest: Callable[[], str]) -> Changed | None:
    return Changed(encoded, digest()) if encoded else None


def _digest(data: memoryview) -> str:
    return tensor_digests(data)[0]
