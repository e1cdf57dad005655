"""Tensors of a delta upload: copied from the base version in the log, with the trainer's changes applied.

The changes of a tensor are known once its part has arrived (``protocol/delta_parts.py``).

Each byte is copied once, changed in its target, and hashed once, when it is stored. A GPU does this if the ingest has
one and the log is in memory (``gpu_changes``), otherwise threads do. The changes come with the digest of the result, so
the base is not checked separately. Only if a result has another digest, the base is checked, to tell a damaged base
from wrong changes. Finite values are only checked for changed elements; all others were checked when they were stored.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rollout_service.errors import DeltaBaseGone, InvalidDelta, LogCorrupt, NotFound, QuantizationError
from rollout_service.ingest.sources.source import as_tensor, of_dtype
from rollout_service.ingest.staged_parts import StagedParts
from rollout_service.model.convert import Converter, Named, tensor_bytes
from rollout_service.protocol import delta
from rollout_service.protocol.delta_parts import PartHeader, decode_header, most_header_bytes
from rollout_service.protocol.upload import DTYPE_BYTES, BeginUpload, base_digest
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.groups import groups_of
from rollout_service.runtime.threads import in_threads
from rollout_service.store.buffers import ThreadBuffers, round_up
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Recipe, StoredTensor, tensor_digests
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader

if TYPE_CHECKING:
    from rollout_service.ingest.sources.gpu_changes import Changed, Made

logger = logging.getLogger(__name__)

_STRETCH_SEGMENTS = 4
"""Segments of one tensor per thread. Otherwise one thread would work on a large embedding while the others are idle."""
_CHECK_BYTES = 16 << 20
_OUTSIDE = "a change lies outside of its segment"


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
        self._places = {
            self._names[i]: (part, i - tensors.start) for part, tensors in enumerate(begin.delta_parts) for i in tensors
        }
        """Part that covers each tensor, and the tensor's place in its header."""
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
            part, place = self._places[name]
            header = self._headers[part]
            change = header.changes[place]
            if change is None:
                yield None
                continue
            encoded = self._parts.read(part, header.starts[place], change.nbytes)
            yield Change(encoded, change.digest)


@dataclass(eq=False)
class _OnGpu:
    """Tensors that a GPU produces."""

    tensors: list[StoredTensor]
    """Tensors in the GPU's order: those with the same rule for valid numbers are adjacent."""
    made: "Made"
    whole: list[int]
    """Tensors of which all numbers are checked, not only the changed ones."""
    is_asked: bool = False


class DeltaOfVersion:
    """Produces the tensors of one announced delta, as they are stored. Thread-safe.

    Opens the files of its base at the beginning.
    """

    def __init__(
        self,
        log: WeightLog,
        begin: BeginUpload,
        recipe: Recipe,
        converter: Converter,
        mapped: MappedFiles | None = None,
    ) -> None:
        """
        Args:
            recipe: recipe of the new version, which ``converter`` follows.
            mapped: mapped files of a log in memory.

        Raises DeltaBaseGone if ``log`` does not hold the base of ``begin``.
        """
        assert begin.delta is not None
        self._version, self._base, self._converter = begin.version, begin.delta.base, converter
        self._buffers = ThreadBuffers()
        self._on_gpu: dict[str, _OnGpu] = {}
        """Tensors by name, until ``convert`` has yielded them."""
        self._digests: dict[str, str] = {}
        """Announced digest of each tensor that was read."""
        try:
            manifest = log.manifest(self._base)
            if manifest.recipe != recipe:
                raise self._gone("it was quantized otherwise than versions are now")
            stored = {tensor.name: tensor for tensor in manifest.tensors}
            self._require_same(begin, stored)
            self._tensors = {tensor.name: stored[tensor.name] for tensor in begin.tensors}
            """The announced tensors, as they are in the base."""
            self._reader = VersionReader(log.folder(self._base), manifest, mapped)
        except (NotFound, LogCorrupt, OSError) as error:
            raise self._gone(str(error)) from error

    def _require_same(self, begin: BeginUpload, stored: dict[str, StoredTensor]) -> None:
        assert begin.delta is not None
        for tensor in begin.tensors:
            known = stored.get(tensor.name)
            if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                held = "has no such tensor" if known is None else f"holds {known.dtype}{list(known.shape)}"
                raise self._gone(f"{tensor.name} is announced as {tensor.dtype}{list(tensor.shape)}, and it {held}")
        found = base_digest(stored[tensor.name].digest for tensor in begin.tensors)
        if found != begin.delta.base_digest:
            raise self._gone(f"its tensors hash to {found}, and not to {begin.delta.base_digest} as the delta says")

    @property
    def base(self) -> int:
        """Return the base version; the log must keep it until ``close``."""
        return self._base

    def batches(self, names: Iterable[str], batch_bytes: int) -> Iterator[list[str]]:
        """Yield the names in lists whose tensors have about ``batch_bytes``: one part may cover many tensors."""
        return groups_of(names, lambda name: self._tensors[name].nbytes, batch_bytes)

    def reading(
        self,
        changes: Callable[[Sequence[str]], Iterable[Change | None]],
        slot: Callable[[str], memoryview] | None,
        gpu: torch.device | None = None,
    ) -> Callable[[Sequence[str]], Iterator[Named]]:
        """Return a function that reads tensors of the new version.

        Args:
            changes: returns the change of each of some tensors; None: unchanged.
            slot: returns the memory of a tensor in the new version, in which it is then produced; None: there is none.
            gpu: produces the changed tensors of a log in memory, in the current stream; pass them to ``convert``.
                None: they are produced on the host.
        """

        def read(names: Sequence[str]) -> Iterator[Named]:
            came = list(changes(names))
            tensors = [self._tensors[name] for name in names]
            for tensor, change in zip(tensors, came, strict=True):
                self._digests[tensor.name] = tensor.digest if change is None else change.digest
                self._on_gpu.pop(tensor.name, None)  # left over from an attempt that failed
            encoded = [None if change is None else change.encoded for change in came]
            del came
            # before the first tensor is requested, so that threads that take turns with the GPU decode concurrently
            decoded = [] if gpu is None or not self._reader.is_mapped else self._decoded(tensors, encoded)
            return made(tensors, encoded, decoded)

        def made(
            tensors: Sequence[StoredTensor],
            encoded: Sequence[memoryview | None],
            decoded: "Sequence[tuple[StoredTensor, Changed]]",
        ) -> Iterator[Named]:
            by_gpu = self._made_on(gpu, decoded) if gpu is not None and decoded else {}
            del decoded
            for tensor, data, changed in zip(tensors, self._places(tensors, slot), encoded, strict=True):
                if tensor.name in by_gpu:
                    self._on_gpu[tensor.name], there = by_gpu.pop(tensor.name)
                    yield tensor.name, of_dtype(there, tensor.dtype, tensor.shape)
                    del there
                    continue
                self._make(tensor, changed, data)
                yield tensor.name, as_tensor(data, tensor.dtype, tensor.shape)

        return read

    def convert(
        self, tensors: Iterable[Named], *, to_cpu: bool = True, checks: DeferredChecks | None = None
    ) -> Iterator[Named]:
        """Yield tensors of ``reading`` unchanged, with the interface of ``Converter.convert``.

        Tensors on the CPU are already checked; checks of tensors on a GPU are added to ``checks``.
        """
        del to_cpu
        for name, tensor in tensors:
            on_gpu = self._on_gpu.pop(name, None)
            if on_gpu is not None and not on_gpu.is_asked:
                assert checks is not None, "what a GPU makes is put into slots"
                self._ask(on_gpu, checks)
            yield name, tensor
            del tensor, on_gpu  # free it before the next is produced

    def require_announced(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise for the first of these tensors of the new version that differs from the announcement.

        Raises DeltaBaseGone if the base is damaged there, otherwise InvalidDelta.
        """
        for tensor in tensors:
            digest = self._digests.get(tensor.name)
            if digest is not None and tensor.digest != digest:
                raise self._other_than_announced(self._tensors[tensor.name], tensor.digest)

    def close(self) -> None:
        """Close the base's files."""
        self._reader.close()

    def _places(self, tensors: Sequence[StoredTensor], slot: Callable[[str], memoryview] | None) -> list[memoryview]:
        """Return the memory in which each tensor is produced: its own, or a part of one buffer that this thread's next
        call reuses."""
        if slot is not None:
            return [slot(tensor.name) for tensor in tensors]
        ends = list(accumulate(round_up(tensor.nbytes) for tensor in tensors))
        buffer = self._buffers.take(ends[-1])
        starts = (end - round_up(tensor.nbytes) for end, tensor in zip(ends, tensors, strict=True))
        return [buffer[start : start + each.nbytes] for start, each in zip(starts, tensors, strict=True)]

    def _decoded(
        self, tensors: Sequence[StoredTensor], encoded: Sequence[memoryview | None]
    ) -> "list[tuple[StoredTensor, Changed]]":
        """Return the changed tensors in the GPU's order. Raises InvalidDelta for undecodable bytes."""
        from rollout_service.ingest.sources.gpu_changes import Changed  # needs triton

        wanted = [(tensor, data) for tensor, data in zip(tensors, encoded, strict=True) if data is not None]
        wanted.sort(key=lambda each: self._kind(each[0]))
        decoded = []
        for tensor, data in wanted:
            try:
                changed = Changed(self._reader.view_of(tensor), data, DTYPE_BYTES[tensor.dtype])
            except ValueError as error:
                raise self._undecoded(tensor, str(error)) from error
            decoded.append((tensor, changed))
        return decoded

    def _made_on(
        self, gpu: torch.device, decoded: "Sequence[tuple[StoredTensor, Changed]]"
    ) -> dict[str, tuple[_OnGpu, torch.Tensor]]:
        """Return the tensors by name, with their bytes, uint8. Empty if the GPU is out of memory; the host then
        produces them."""
        from rollout_service.ingest.sources.gpu_changes import made_on  # needs triton

        try:
            made = made_on(gpu, [changed for _, changed in decoded])
        except torch.cuda.OutOfMemoryError as error:
            names = ", ".join(tensor.name for tensor, _ in decoded[:4])
            logger.warning("%d tensors (%s, ...) are changed on the host: the GPU has no room: %s",
                           len(decoded), names, error)  # fmt: skip
            return {}
        whole = [number for number, (_, changed) in enumerate(decoded) if changed.whole]
        on_gpu = _OnGpu([tensor for tensor, _ in decoded], made, whole)
        return {tensor.name: (on_gpu, data) for tensor, data in zip(on_gpu.tensors, made.tensors, strict=True)}

    def _kind(self, tensor: StoredTensor) -> tuple[int, str, bool]:
        """Sort key: equal for tensors with the same rule for valid numbers; elements of one size are adjacent."""
        dtype = tensor.dtype
        return DTYPE_BYTES[dtype], dtype, self._converter.makes_scales(tensor.name)

    def _ask(self, on_gpu: _OnGpu, checks: DeferredChecks) -> None:
        """Queue checks that changes lie within their segments, and that the new values may be stored."""
        made, tensors = on_gpu.made, on_gpu.tensors
        on_gpu.is_asked = True

        def undecoded() -> None:
            if (number := made.first_outside()) is not None:
                raise self._undecoded(tensors[number], _OUTSIDE)

        def complain(numbers: Sequence[int]) -> None:
            for number in numbers:
                self._complain(tensors[number], tensor_bytes(made.tensors[number]))

        checks.add(~made.is_outside.any(), undecoded)
        for _, group in groupby(range(len(tensors)), lambda number: self._kind(tensors[number])):
            numbers = list(group)
            elements = made.became(numbers[0], numbers[-1] + 1)
            if elements.numel():
                dtype = tensors[numbers[0]].dtype
                name = tensors[numbers[0]].name
                are_sound = self._converter.are_sound(name, of_dtype(elements.view(torch.uint8), dtype, (-1,)))
                checks.add(are_sound, partial(complain, numbers))
        for number in on_gpu.whole:
            tensor = tensors[number]
            data = of_dtype(made.tensors[number], tensor.dtype, (-1,))
            checks.add(self._converter.are_sound(tensor.name, data), partial(complain, [number]))

    def _make(self, tensor: StoredTensor, encoded: memoryview | None, data: memoryview) -> None:
        """Produce the tensor in ``data``. ``encoded``: its changes; None: it has none."""
        itemsize = DTYPE_BYTES[tensor.dtype]

        def make(stretch: list[slice]) -> bool:
            told: list[delta.Array] = []
            for place in stretch:
                self._reader.copy_unchecked(tensor, place, data[place])
                if (segment := changed.get(place.start)) is not None:
                    told.append(delta.apply_segment(segment, data[place], itemsize))
            if not told:
                return True
            values = np.concatenate(told) if len(told) > 1 else told[0]
            return self._may_be_stored(tensor, as_tensor(values.data, tensor.dtype, (len(values),)))

        try:
            segments = [] if encoded is None else delta.changed_segments(encoded, data.nbytes, itemsize)
            changed = {segment.place.start: segment for segment in segments}
            places = list(delta.segments(data.nbytes))
            stretches = [places[i : i + _STRETCH_SEGMENTS] for i in range(0, len(places), _STRETCH_SEGMENTS)]
            # produce all of them even if one is invalid: the digest of the whole tells whether base or changes are
            # wrong
            sound = all(list(in_threads(make, stretches)))
        except ValueError as error:
            raise self._undecoded(tensor, str(error)) from error
        except (LogCorrupt, OSError) as error:
            raise self._gone(str(error)) from error
        if not sound:
            self._complain(tensor, data)

    def _complain(self, tensor: StoredTensor, data: memoryview) -> None:
        """Raise the reason why these bytes of the tensor may not be stored; return if they may."""
        elements = as_tensor(data, tensor.dtype, tensor.shape)
        if self._may_be_stored(tensor, elements):
            return
        if (found := tensor_digests(data)[0]) != self._digests[tensor.name]:
            raise self._other_than_announced(tensor, found)
        for _ in self._converter.convert([(tensor.name, elements)]):
            pass  # it raises, and names the element

    def _may_be_stored(self, tensor: StoredTensor, elements: torch.Tensor) -> bool:
        try:
            for _ in self._converter.convert([(tensor.name, elements)]):
                pass
        except QuantizationError:
            return False
        return True

    def _other_than_announced(self, tensor: StoredTensor, found: str) -> InvalidDelta | DeltaBaseGone:
        try:
            self._reader.check(tensor, memoryview(bytearray(_CHECK_BYTES)))
        except (LogCorrupt, OSError) as error:
            return self._gone(str(error))
        return self._invalid(
            tensor, f"make a tensor that hashes to {found}, and not to {self._digests[tensor.name]} as was announced"
        )

    def _undecoded(self, tensor: StoredTensor, why: str) -> InvalidDelta:
        return self._invalid(tensor, f"cannot be decoded: {why}")

    def _invalid(self, tensor: StoredTensor, what: str) -> InvalidDelta:
        return InvalidDelta(
            f"version {self._version}: the changes of {tensor.name} since version {self._base} {what}: push the whole "
            "version; the one before stays live",
            {"version": self._version, "base": self._base, "tensor": tensor.name},
        )

    def _gone(self, why: str) -> DeltaBaseGone:
        return DeltaBaseGone(
            f"version {self._version} comes as a delta of version {self._base}, which cannot be changed: {why}. Push "
            "the whole version, with transport='http' or again with the same client",
            {"version": self._version, "base": self._base},
        )
