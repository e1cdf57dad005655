"""The tensors of a delta: those of its base, read from the log, with the changes that a trainer has sent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from rollout_service.errors import DeltaBaseGone, InvalidDelta, LogCorrupt, NotFound
from rollout_service.ingest.sources.source import as_tensor, in_batches
from rollout_service.model.convert import Named, tensor_bytes
from rollout_service.protocol import delta
from rollout_service.protocol.upload import DTYPE_BYTES, BeginUpload, UploadTensor, base_digest
from rollout_service.store.direct_io import ThreadBuffers, round_up
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.reading import Piece, VersionReader, pieces
from rollout_service.threads import STRETCH_BYTES, in_threads


class _Tensor(NamedTuple):
    announced: UploadTensor
    stored: StoredTensor
    """In the base."""
    digest: str
    """That it must have in the new version."""
    changed: bool


class DeltaOfVersion:
    """Makes the tensors of one announced delta, for any number of threads.

    The files of its base are open from the beginning, and each chunk is checked as it is read.
    """

    def __init__(self, log: WeightLog, begin: BeginUpload) -> None:
        """Raises DeltaBaseGone if ``log`` does not hold the base that ``begin`` means."""
        assert begin.delta is not None
        self._version, self._base = begin.version, begin.delta.base
        self._buffers = ThreadBuffers()
        try:
            manifest = log.manifest(self._base)
            stored = {tensor.name: tensor for tensor in manifest.tensors}
            self._tensors = dict(self._matched(begin, stored))
            self._reader = VersionReader(log.folder(self._base), manifest)
        except (NotFound, LogCorrupt, OSError) as error:
            raise self._gone(str(error)) from error

    def _matched(self, begin: BeginUpload, stored: dict[str, StoredTensor]) -> Iterator[tuple[str, _Tensor]]:
        assert begin.delta is not None
        for tensor in begin.tensors:
            known = stored.get(tensor.name)
            if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                held = "has no such tensor" if known is None else f"holds {known.dtype}{list(known.shape)}"
                raise self._gone(f"{tensor.name} is announced as {tensor.dtype}{list(tensor.shape)}, and it {held}")
        found = base_digest(stored[tensor.name].digest for tensor in begin.tensors)
        if found != begin.delta.base_digest:
            raise self._gone(f"its tensors hash to {found}, and not to {begin.delta.base_digest} as the delta says")
        for tensor, change in zip(begin.tensors, begin.delta.changes, strict=True):
            base = stored[tensor.name]
            yield tensor.name, _Tensor(tensor, base, change.digest if change else base.digest, change is not None)

    @property
    def base(self) -> int:
        """The version that is changed; the log must keep it until ``close``."""
        return self._base

    @property
    def unchanged(self) -> list[str]:
        """Tensors of which nothing comes."""
        return [name for name, tensor in self._tensors.items() if not tensor.changed]

    def batches(self, names: Iterable[str], batch_bytes: int) -> Iterator[list[str]]:
        """The names, in lists whose tensors have about ``batch_bytes``: a part of changes may be of many tensors."""
        return in_batches(((name, self._tensors[name].stored.nbytes) for name in names), batch_bytes)

    def reading(
        self, changes: Callable[[Sequence[str]], Iterable[Named]], room: Callable[[str], memoryview] | None
    ) -> Callable[[Sequence[str]], Iterator[Named]]:
        """A function that reads tensors of the new version.

        Args:
            changes: reads what came of changed tensors, as bytes.
            room: where the new version has a tensor of that name, which is then made there; None: it has no memory.
        """

        def read(names: Sequence[str]) -> Iterator[Named]:
            tensors = [self._tensors[name] for name in names]
            came = iter(changes([tensor.stored.name for tensor in tensors if tensor.changed]))
            for tensor, data in zip(tensors, self._places(tensors, room), strict=True):
                self._read_base(tensor.stored, data)
                if tensor.changed:
                    self._apply(tensor, tensor_bytes(next(came)[1]), data)
                yield tensor.stored.name, as_tensor(data, tensor.announced.dtype, tensor.announced.shape)

        return read

    def require_announced(self, tensors: Iterable[StoredTensor]) -> None:
        """Raises InvalidDelta for the first of these tensors of the new version that is not what was announced."""
        for tensor in tensors:
            known = self._tensors.get(tensor.name)
            if known is not None and tensor.digest != known.digest:
                raise self._invalid(
                    tensor.name,
                    f"make a tensor that hashes to {tensor.digest}, and not to {known.digest} as was announced",
                )

    def close(self) -> None:
        """Close the base's files."""
        self._reader.close()

    def _places(self, tensors: Sequence[_Tensor], room: Callable[[str], memoryview] | None) -> list[memoryview]:
        """Where each of these is made: in its room, or in one buffer, which this thread's next call uses again."""
        if room is not None:
            return [room(tensor.stored.name) for tensor in tensors]
        ends = list(accumulate(round_up(tensor.stored.nbytes) for tensor in tensors))
        buffer = self._buffers.take(ends[-1])
        starts = (end - round_up(tensor.stored.nbytes) for end, tensor in zip(ends, tensors, strict=True))
        return [buffer[start : start + each.stored.nbytes] for start, each in zip(starts, tensors, strict=True)]

    def _read_base(self, stored: StoredTensor, data: memoryview) -> None:
        def read(piece: Piece) -> None:
            self._reader.read(piece, data[piece.offset - stored.offset :])

        found = list(pieces(((stored, chunk) for chunk in stored.chunks()), STRETCH_BYTES))
        try:
            # a vocabulary's embedding would otherwise be read by one thread while the others have nothing to do
            for _ in in_threads(read, found):
                pass
        except (LogCorrupt, OSError) as error:
            raise self._gone(str(error)) from error

    def _apply(self, tensor: _Tensor, encoded: memoryview, data: memoryview) -> None:
        try:
            delta.apply(encoded, data, DTYPE_BYTES[tensor.announced.dtype])
        except ValueError as error:
            raise self._invalid(tensor.stored.name, f"cannot be decoded: {error}") from error

    def _invalid(self, name: str, what: str) -> InvalidDelta:
        return InvalidDelta(
            f"version {self._version}: the changes of {name} since version {self._base} {what}: push the whole "
            "version; the one before stays live",
            {"version": self._version, "base": self._base, "tensor": name},
        )

    def _gone(self, why: str) -> DeltaBaseGone:
        return DeltaBaseGone(
            f"version {self._version} comes as a delta of version {self._base}, which cannot be changed: {why}. Push "
            "the whole version, with transport='http' or again with the same client",
            {"version": self._version, "base": self._base},
        )
