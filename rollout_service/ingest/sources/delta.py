"""The tensors of a delta: those of its base, copied from the log, with the changes that a trainer has sent.

Each byte is copied once, changed where it then is, and hashed once, when it is stored; by a GPU, if the ingest has one
and the log is in memory (``gpu_changes``), and else by threads: the digest that the result must
have is announced, so the base need not be checked as well. Only if a result has another digest is it looked at, to tell
whether the base is damaged or the changes are. Whether weights are numbers is asked of the changed elements alone; all
others were stored, and so were asked, before.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from rollout_service.errors import DeltaBaseGone, InvalidDelta, LogCorrupt, NotFound, QuantizationError
from rollout_service.gpu_streams import own_stream_done
from rollout_service.ingest.sources.gpu_changes import MOST_BYTES, Made, made_on
from rollout_service.ingest.sources.source import as_tensor, in_batches, of_dtype
from rollout_service.model.convert import Converter, Named, tensor_bytes
from rollout_service.protocol import delta
from rollout_service.protocol.upload import DTYPE_BYTES, BeginUpload, UploadTensor, base_digest
from rollout_service.quant.verdicts import Verdicts
from rollout_service.store.direct_io import ThreadBuffers, round_up
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Recipe, StoredTensor, tensor_digests
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader
from rollout_service.threads import in_threads

logger = logging.getLogger(__name__)

_STRETCH_SEGMENTS = 8
"""Of one tensor, that one thread makes: a vocabulary's embedding would keep it busy while the others have nothing."""
_CHECK_BYTES = 16 << 20
_OUTSIDE = "a change lies outside of its segment"
_NO_ROOM = "%s is changed on the host, since the GPU has no room: %s"


class _Tensor(NamedTuple):
    announced: UploadTensor
    stored: StoredTensor
    """In the base."""
    digest: str
    """That it must have in the new version."""
    changed: bool


class _Stretch(NamedTuple):
    places: list[slice]
    """Segments of one tensor that follow each other."""
    changes: dict[int, delta.Segment]
    """What changes in the tensor, by the first bytes."""


class _Asked(Verdicts):
    """Keeps what is asked: of a delta, who is at fault is found otherwise than of other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[torch.Tensor] = []

    def ask(self, is_sound: torch.Tensor, complain: Callable[[], object]) -> None:
        """See ``Verdicts``."""
        del complain
        self.answers.append(is_sound)


class DeltaOfVersion:
    """Makes the tensors of one announced delta, for any number of threads, as they are stored.

    The files of its base are open from the beginning.
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
            recipe: of the new version, which ``converter`` follows.
            mapped: of a log in memory.

        Raises DeltaBaseGone if ``log`` does not hold the base that ``begin`` means.
        """
        assert begin.delta is not None
        self._version, self._base, self._converter = begin.version, begin.delta.base, converter
        self._buffers = ThreadBuffers()
        self._are_inside: dict[str, torch.Tensor] = {}
        """Of tensors that a GPU makes: see ``gpu_changes.Made``."""
        try:
            manifest = log.manifest(self._base)
            if manifest.recipe != recipe:
                raise self._gone("it was quantized otherwise than versions are now")
            stored = {tensor.name: tensor for tensor in manifest.tensors}
            self._tensors = dict(self._matched(begin, stored))
            self._reader = VersionReader(log.folder(self._base), manifest, mapped)
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
        self,
        changes: Callable[[Sequence[str]], Iterable[Named]],
        room: Callable[[str], memoryview] | None,
        gpu: torch.device | None = None,
    ) -> Callable[[Sequence[str]], Iterator[Named]]:
        """A function that reads tensors of the new version.

        Args:
            changes: reads what came of changed tensors, as bytes.
            room: where the new version has a tensor of that name, which is then made there; None: it has no memory.
            gpu: on which changed tensors of a log in memory are made, in the current stream; ``convert`` is to be
                given them. None: they are made on the host.
        """

        def read(names: Sequence[str]) -> Iterator[Named]:
            tensors = [self._tensors[name] for name in names]
            came = iter(changes([tensor.stored.name for tensor in tensors if tensor.changed]))
            for tensor, data in zip(tensors, self._places(tensors, room), strict=True):
                name, dtype, shape = tensor.stored.name, tensor.announced.dtype, tensor.announced.shape
                encoded = tensor_bytes(next(came)[1]) if tensor.changed else None
                self._are_inside.pop(name, None)
                made = None if gpu is None or encoded is None else self._made_on(gpu, tensor, encoded)
                if made is not None:
                    self._are_inside[name] = made.are_inside
                    yield name, of_dtype(made.data, dtype, shape)
                    del made  # before the next takes the GPU's memory
                    continue
                self._make(tensor, encoded, data, gpu)
                yield name, as_tensor(data, dtype, shape)

        return read

    def convert(
        self, tensors: Iterable[Named], *, to_cpu: bool = True, verdicts: Verdicts | None = None
    ) -> Iterator[Named]:
        """As ``Converter.convert``, for what ``reading`` has made: it is as it is stored.

        What lies on the CPU was looked at; of what a GPU makes, ``verdicts`` is asked.
        """
        del to_cpu
        for name, tensor in tensors:
            if (are_inside := self._are_inside.pop(name, None)) is not None:
                assert verdicts is not None, "what a GPU makes is put into rooms"
                self._ask(name, tensor, are_inside, verdicts)
            yield name, tensor
            del tensor  # before the next is made

    def require_announced(self, tensors: Iterable[StoredTensor]) -> None:
        """Raises for the first of these tensors of the new version that is not what was announced.

        DeltaBaseGone if the base is damaged there, InvalidDelta if it is not.
        """
        for tensor in tensors:
            known = self._tensors.get(tensor.name)
            if known is not None and tensor.digest != known.digest:
                raise self._other_than_announced(known, tensor.digest)

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

    def _made_on(self, gpu: torch.device, tensor: _Tensor, encoded: memoryview) -> Made | None:
        """None: the host is to make it."""
        nbytes, itemsize = tensor.stored.nbytes, DTYPE_BYTES[tensor.announced.dtype]
        if not self._reader.is_mapped or nbytes > MOST_BYTES:
            return None
        try:
            segments = delta.changed_segments(encoded, nbytes, itemsize)
            return made_on(gpu, self._reader.view_of(tensor.stored), segments, itemsize)
        except ValueError as error:
            raise self._undecoded(tensor, str(error)) from error
        except torch.cuda.OutOfMemoryError as error:
            logger.warning(_NO_ROOM, tensor.stored.name, error)
            return None

    def _make_stretch_on(self, gpu: torch.device, tensor: _Tensor, stretch: _Stretch, data: memoryview) -> bool | None:
        """Of a tensor that is too large to be on the GPU at once. Returns whether what changed may be in a version.

        None: the host is to make it. Raises ValueError for changes that do not decode.
        """
        start, stop = stretch.places[0].start, stretch.places[-1].stop
        segments = [stretch.changes[place.start] for place in stretch.places if place.start in stretch.changes]
        if not segments or not self._reader.is_mapped:
            return None
        itemsize = DTYPE_BYTES[tensor.announced.dtype]
        within = [each._replace(place=slice(each.place.start - start, each.place.stop - start)) for each in segments]
        try:
            with own_stream_done(gpu) if gpu.type == "cuda" else nullcontext():
                made = made_on(gpu, self._reader.view_of(tensor.stored)[start:stop], within, itemsize)
                if made is None:
                    return None
                torch.frombuffer(data[start:stop], dtype=torch.uint8).copy_(made.data, non_blocking=True)
                if not bool(made.are_inside):
                    raise ValueError(_OUTSIDE)
                return self._may_be_stored(tensor, of_dtype(made.data, tensor.announced.dtype, (-1,)))
        except torch.cuda.OutOfMemoryError as error:
            logger.warning(_NO_ROOM, tensor.stored.name, error)
            return None

    def _ask(self, name: str, data: torch.Tensor, are_inside: torch.Tensor, verdicts: Verdicts) -> None:
        tensor = self._tensors[name]

        def undecoded() -> None:
            raise self._undecoded(tensor, _OUTSIDE)

        verdicts.ask(are_inside, undecoded)
        found = _Asked()
        for _ in self._converter.convert([(name, data)], to_cpu=False, verdicts=found):
            pass
        for is_sound in found.answers:
            verdicts.ask(is_sound, lambda: self._complain(tensor, tensor_bytes(data)))

    def _make(
        self, tensor: _Tensor, encoded: memoryview | None, data: memoryview, gpu: torch.device | None = None
    ) -> None:
        """Make it in ``data``. ``encoded``: its changes; None: it has none. ``gpu``: see ``reading``."""
        itemsize = DTYPE_BYTES[tensor.announced.dtype]

        def make(stretch: _Stretch) -> bool:
            if gpu is not None and (sound := self._make_stretch_on(gpu, tensor, stretch, data)) is not None:
                return sound
            told: list[delta.Array] = []
            for place in stretch.places:
                self._reader.copy_unchecked(tensor.stored, place, data[place])
                if (segment := stretch.changes.get(place.start)) is not None:
                    told.append(apply_segment(segment, data[place], itemsize))
            return not told or self._are_sound(tensor, np.concatenate(told) if len(told) > 1 else told[0])

        apply_segment = _applier()
        try:
            segments = [] if encoded is None else delta.changed_segments(encoded, data.nbytes, itemsize)
            stretches = _stretches(data.nbytes, segments)
            # all are made, also if one is unsound: whose fault that is can be told from the whole
            sound = all(list(in_threads(make, stretches)))
        except ValueError as error:
            raise self._undecoded(tensor, str(error)) from error
        except (LogCorrupt, OSError) as error:
            raise self._gone(str(error)) from error
        if not sound:
            self._complain(tensor, data)

    def _complain(self, tensor: _Tensor, data: memoryview) -> None:
        """Raise why these bytes of it are not what may be in a version."""
        if (found := tensor_digests(data)[0]) != tensor.digest:
            raise self._other_than_announced(tensor, found)
        for _ in self._converter.convert(
            [(tensor.stored.name, as_tensor(data, tensor.announced.dtype, tensor.announced.shape))]
        ):
            pass  # it raises, and names the element

    def _are_sound(self, tensor: _Tensor, values: delta.Array) -> bool:
        """Whether these elements, in one dimension, may be in a version."""
        return self._may_be_stored(tensor, as_tensor(values.data, tensor.announced.dtype, (len(values),)))

    def _may_be_stored(self, tensor: _Tensor, elements: torch.Tensor) -> bool:
        try:
            for _ in self._converter.convert([(tensor.stored.name, elements)]):
                pass
        except QuantizationError:
            return False
        return True

    def _other_than_announced(self, tensor: _Tensor, found: str) -> InvalidDelta | DeltaBaseGone:
        try:
            self._reader.check(tensor.stored, memoryview(bytearray(_CHECK_BYTES)))
        except (LogCorrupt, OSError) as error:
            return self._gone(str(error))
        return self._invalid(
            tensor.stored.name, f"make a tensor that hashes to {found}, and not to {tensor.digest} as was announced"
        )

    def _undecoded(self, tensor: _Tensor, why: str) -> InvalidDelta:
        return self._invalid(tensor.stored.name, f"cannot be decoded: {why}")

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


@cache
def _applier() -> Callable[[delta.Segment, memoryview, int], delta.Array]:
    try:
        from rollout_service.ingest.sources.compiled_changes import apply_segment
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return delta.apply_segment
    return apply_segment


def _stretches(nbytes: int, changes: Iterable[delta.Segment]) -> list[_Stretch]:
    places = list(delta.segments(nbytes))
    by_start = {change.place.start: change for change in changes}
    return [_Stretch(places[i : i + _STRETCH_SEGMENTS], by_start) for i in range(0, len(places), _STRETCH_SEGMENTS)]
