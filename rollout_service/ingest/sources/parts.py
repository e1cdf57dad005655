"""The received parts of an upload, and reading tensors from them."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rollout_service.ingest.sources.gpu_parts import InStream, RegisteredParts, is_registered
from rollout_service.ingest.sources.source import as_tensor
from rollout_service.model.convert import BATCH_BYTES, Named
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor, tensor_offsets
from rollout_service.runtime.threads import STRETCH_BYTES, in_threads
from rollout_service.store.buffers import ThreadBuffers, round_up
from rollout_service.store.reading import read_at

logger = logging.getLogger(__name__)
_PART_FILE = re.compile(r"part-([0-9]{6,})\.([0-9a-f]{32})")


@dataclass(frozen=True)
class Arrival:
    """The effect of a part's arrival."""

    whole: list[str]
    """Tensors whose parts are now all there. If the part replaced another one, the tensors to convert again."""
    replaced: Path | None
    """The file of the replaced part; None: it replaced nothing."""


def take_in(folder: Path, part: int, digest: str, received: Path) -> Path:
    """Move a file into ``folder`` as a part. Its name contains the digest, so that a restart can check it."""
    path = folder / f"part-{part:06d}.{digest}"
    received.replace(path)
    return path


def left_behind(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield number, digest and file of each undamaged part that an earlier process received.

    Removes all other files; their parts are sent again. Raises OSError if one cannot be removed.
    """
    found: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for path in sorted(folder.glob("part-*")):
        if match := _PART_FILE.fullmatch(path.name):
            found[int(match[1])].append((match[2], path))
        else:
            path.unlink()  # its upload was interrupted
    for part, files in found.items():
        if len(files) == 1 and _digest_of(files[0][1]) == files[0][0]:
            yield part, *files[0]
        else:  # the file is damaged, or one part was just being replaced by the other
            for _, path in files:
                path.unlink()


class ReceivedParts:
    """The received parts of one upload. Lives in the ingest's event loop, except ``files`` and ``converted``."""

    def __init__(self, folder: Path, tensors: tuple[UploadTensor, ...], part_bytes: int) -> None:
        self._folder = folder
        self.files = PartFiles(folder, tensors, part_bytes)
        """Reads tensors whose parts are all there."""
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        """Size in bytes of all parts together."""
        self.missing = set(range(-(-self.nbytes // part_bytes)))
        """Numbers of the parts that have not arrived."""
        self.digests: dict[int, str] = {}
        """Digests of the received parts."""
        self.empty: list[str] = []
        """Tensors without elements, which need no part."""
        self._senders: dict[int, str] = {}
        self._lacking: dict[str, int] = {}
        self._tensors_of: dict[int, list[str]] = defaultdict(list)
        self._unconverted: dict[int, int] = defaultdict(int)
        for tensor in tensors:
            parts = self.files.parts_of(tensor.name)
            self._lacking[tensor.name] = len(parts)
            for part in parts:
                self._tensors_of[part].append(tensor.name)
                self._unconverted[part] += 1
            if not parts:
                self.empty.append(tensor.name)

    def came_from(self, part: int) -> str | None:
        """Return the uploader that sent the part; None if it has not arrived."""
        return self._senders.get(part)

    def add(
        self, part: int, digest: str, received: Path, uploader: str = "", data: memoryview | None = None
    ) -> Arrival:
        """Take in a file as the whole part. ``data``: the same bytes in memory, if they are still there."""
        replaced = self.files.add(part, digest, received, data)
        self.digests[part], self._senders[part] = digest, uploader
        self.missing.discard(part)
        if replaced is None:
            for name in self._tensors_of[part]:
                self._lacking[name] -= 1
        return Arrival([name for name in self._tensors_of[part] if self._lacking[name] == 0], replaced)

    def left_behind(self) -> Iterator[tuple[int, str, Path]]:
        """See ``left_behind``."""
        return left_behind(self._folder)

    def converted(self, names: Sequence[str]) -> None:
        """Note that these tensors are no longer read; a part leaves memory once none of its tensors is needed. Not
        thread-safe."""
        for part in (part for name in names for part in self.files.parts_of(name)):
            self._unconverted[part] -= 1
            if self._unconverted[part] <= 0:
                self.files.forget(part)


class PartFiles:
    """The parts of an upload on disk, and the tensors in them."""

    def __init__(self, folder: Path, tensors: tuple[UploadTensor, ...], part_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._place = {
            # computing the size each time would take a tenth of the time of reading a tensor
            tensor.name: InStream(tensor, offset, tensor.nbytes)
            for tensor, offset in tensor_offsets(tensors)
        }
        self._paths: dict[int, Path] = {}
        self._data: dict[int, memoryview | None] = {}
        self._buffers = ThreadBuffers()

    def add(self, part: int, digest: str, received: Path, data: memoryview | None = None) -> Path | None:
        """Take in a file as the whole part.

        ``data``: its content, read in place of the file until ``forget``. Return the file of the replaced part, if any.
        """
        replaced, path = self._paths.get(part), take_in(self._folder, part, digest, received)
        self._paths[part], self._data[part] = path, data
        return replaced

    def forget(self, part: int) -> None:
        """Read a part from its file from now on."""
        self._data[part] = None

    def is_registered(self, part: int) -> bool:
        """Return True if the part is in memory that is registered with a GPU."""
        data = self._data[part]
        return data is not None and is_registered(torch.frombuffer(data, dtype=torch.uint8))

    def nbytes_of(self, name: str) -> int:
        """Return the size of one tensor in bytes."""
        return self._place[name].nbytes

    def parts_of(self, name: str) -> range:
        """Return the parts that hold bytes of one tensor."""
        _, offset, nbytes = self._place[name]
        first = offset // self._part_bytes
        return range(first, max(first, -(-(offset + nbytes) // self._part_bytes)))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of these tensors from its parts, which must all be there. Raises OSError.

        A tensor within one part in memory is a view of that memory. Others share one buffer, which this thread's next
        call reuses, so finish using them first.
        """
        return self._read(names, lambda _: None, None)

    def reading(
        self, room: Callable[[UploadTensor], memoryview | None], gpu: torch.device | None
    ) -> Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]:
        """Return a function like ``read`` that assembles tensors in given memory.

        Args:
            room: returns the memory, uint8 [nbytes], of a tensor that is stored unchanged; None for others. A tensor
                that several parts hold is assembled there.
            gpu: tensors in registered memory are copied to it on the current stream; parts must stay until then. Of
                tensors above ``BATCH_BYTES``, only matrices without a ``room`` are. None: all tensors are on the host.
        """

        def read(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            return self._read(names, room, gpu)

        return read

    def _read(
        self, names: Sequence[str], room: Callable[[UploadTensor], memoryview | None], gpu: torch.device | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        registered = None if gpu is None else RegisteredParts(self._data, self._part_bytes, gpu)
        places = [self._place_of(name, room, registered) for name in names]
        on_gpu: Iterator[Named] = iter(())
        if registered is not None:
            on_gpu = registered.read([place.wanted for place in places if place.is_registered])
        sizes = [round_up(place.wanted.nbytes) if place.needs_buffer else 0 for place in places]
        buffer, start = self._buffers.take(sum(sizes)), 0
        for place, size in zip(places, sizes, strict=True):
            tensor, offset, _ = place.wanted
            if place.is_registered:
                yield next(on_gpu)
            elif place.view is not None:
                yield tensor.name, place.view
            elif place.room is not None:
                yield tensor.name, self._assembled(tensor, offset, place.room)
            else:
                yield tensor.name, self._assembled(tensor, offset, buffer[start : start + size])
            start += size

    def _place_of(
        self, name: str, room: Callable[[UploadTensor], memoryview | None], registered: RegisteredParts | None
    ) -> "_Place":
        wanted = self._place[name]
        tensor, offset, nbytes = wanted
        # the quantizer copies large matrices to the GPU in one piece, but not unquantized tensors or experts
        may = nbytes <= BATCH_BYTES or (len(tensor.shape) == 2 and room(tensor) is None)
        if may and registered is not None and nbytes and registered.hold(wanted):
            return _Place(wanted, None, None, is_registered=True)
        return _Place(wanted, self._view(tensor, offset), room(tensor), is_registered=False)

    def _spans(self, tensor: UploadTensor, offset: int) -> Iterator["_Span"]:
        """Yield the pieces of parts that make up a tensor, in order."""
        position, end = offset, offset + tensor.nbytes
        while position < end:
            part, first = divmod(position, self._part_bytes)
            count = min(self._part_bytes - first, end - position)
            yield _Span(part, first, position - offset, count)
            position += count

    def _view(self, tensor: UploadTensor, offset: int) -> torch.Tensor | None:
        """Return a view of the tensor; None if it is not contiguous in memory, or not aligned."""
        part, first = divmod(offset, self._part_bytes)
        data, itemsize = self._data.get(part), DTYPE_BYTES[tensor.dtype]
        if data is None or not tensor.nbytes or first + tensor.nbytes > self._part_bytes or first % itemsize:
            return None
        # a view of the whole memory, not of a slice: the ``BufferPool`` gets it back when nothing refers to it
        return as_tensor(data, tensor.dtype, tensor.shape, first)

    def _assembled(self, tensor: UploadTensor, offset: int, room: memoryview) -> torch.Tensor:
        """Assemble a tensor in ``room``."""
        copies: list[_Copy] = []
        for span in self._spans(tensor, offset):
            target = room[span.start : span.start + span.nbytes]
            if (data := self._data[span.part]) is not None:
                copies.append(_Copy(target, data, span.first))
            else:
                _read_into(target, self._paths[span.part], span.first)
        if tensor.nbytes < STRETCH_BYTES:
            for copy in copies:
                _copy(copy)
        else:
            for _ in in_threads(_copy, copies):
                pass
        return as_tensor(room, tensor.dtype, tensor.shape)


class _Span(NamedTuple):
    """A piece of a tensor in one part."""

    part: int
    first: int
    """Offset in the part, in bytes."""
    start: int
    """Offset in the tensor, in bytes."""
    nbytes: int


class _Place(NamedTuple):
    """Source and target of one tensor of a call."""

    wanted: InStream
    view: torch.Tensor | None
    room: memoryview | None
    is_registered: bool
    """The GPU reads it from its parts."""

    @property
    def needs_buffer(self) -> bool:
        return self.view is None and self.room is None and not self.is_registered


class _Copy(NamedTuple):
    target: memoryview
    data: memoryview
    """All memory of a part; the ``BufferPool`` gets it back when nothing refers to this object."""
    first: int


def _copy(copy: _Copy) -> None:
    # not by slice assignment, which holds the GIL and so blocks every connection
    target = np.frombuffer(copy.target, np.uint8)
    np.copyto(target, np.frombuffer(copy.data, np.uint8, count=target.nbytes, offset=copy.first))


def _read_into(target: memoryview, path: Path, first: int) -> None:
    with path.open("rb", buffering=0) as file:
        if read_at(file.fileno(), first, target) < target.nbytes:
            raise OSError(f"{path} is shorter than when it came")


def _digest_of(path: Path) -> str | None:
    """Return the digest of a file; None if it cannot be read."""
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(16 << 20):
                hasher.update(chunk)
    except OSError as error:
        logger.warning("%s cannot be read, and its part is asked for again: %s", path, error)
        return None
    return hasher.hexdigest()
