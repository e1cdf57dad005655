"""The parts of an upload: which are there, which tensors that makes whole, and reading these from them."""

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
from rollout_service.store.direct_io import BLOCK_BYTES, DirectFile, ThreadBuffers, round_up
from rollout_service.threads import STRETCH_BYTES, in_threads

logger = logging.getLogger(__name__)
_PART_FILE = re.compile(r"part-([0-9]{6,})\.([0-9a-f]{32})")


@dataclass(frozen=True)
class Arrival:
    """What the arrival of a part makes possible."""

    whole: list[str]
    """Tensors of which all parts are there now; of a part that took another's place, those to be converted anew."""
    replaced: Path | None
    """The file of other bytes that was the part until now."""


def take_in(folder: Path, part: int, digest: str, received: Path) -> Path:
    """Make a file one of the parts in ``folder``. Its name has the digest: a restart can check what it finds."""
    path = folder / f"part-{part:06d}.{digest}"
    received.replace(path)
    return path


def left_behind(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Number, digest and file of each part that an earlier process took in and that is still what it was.

    Others are removed, to be sent again. Raises OSError for one that cannot be.
    """
    found: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for path in sorted(folder.glob("part-*")):
        if match := _PART_FILE.fullmatch(path.name):
            found[int(match[1])].append((match[2], path))
        else:
            path.unlink()  # it was on its way
    for part, files in found.items():
        if len(files) == 1 and _digest_of(files[0][1]) == files[0][0]:
            yield part, *files[0]
        else:  # damaged or unreadable, or one was just being replaced by the other
            for _, path in files:
                path.unlink()


class ReceivedParts:
    """The parts of one upload. Lives in the ingest's event loop, but for ``files`` and ``converted``."""

    def __init__(self, folder: Path, tensors: tuple[UploadTensor, ...], part_bytes: int) -> None:
        self._folder = folder
        self.files = PartFiles(folder, tensors, part_bytes)
        """Reads tensors whose parts are all there."""
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        """Of all parts."""
        self.missing = set(range(-(-self.nbytes // part_bytes)))
        """Numbers of the parts that have not come."""
        self.digests: dict[int, str] = {}
        """Of the parts that are there."""
        self.empty: list[str] = []
        """Tensors without an element, which need no part."""
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
        """Who sent the part that is there; None: it is not there."""
        return self._senders.get(part)

    def add(
        self, part: int, digest: str, received: Path, uploader: str = "", data: memoryview | None = None
    ) -> Arrival:
        """Take in a file as the whole part. ``data``: the same bytes in memory, if they are there still."""
        replaced = self.files.add(part, digest, received, data)
        self.digests[part], self._senders[part] = digest, uploader
        self.missing.discard(part)
        if replaced is None:
            for name in self._tensors_of[part]:
                self._lacking[name] -= 1
        return Arrival([name for name in self._tensors_of[part] if self._lacking[name] == 0], replaced)

    def left_behind(self) -> Iterator[tuple[int, str, Path]]:
        """See the function."""
        return left_behind(self._folder)

    def converted(self, names: Sequence[str]) -> None:
        """Nobody reads these tensors any more: parts that no other needs leave memory. One call at a time."""
        for part in (part for name in names for part in self.files.parts_of(name)):
            self._unconverted[part] -= 1
            if self._unconverted[part] <= 0:
                self.files.forget(part)


class PartFiles:
    """The parts of an upload on disk, and the tensors that can be read from them."""

    def __init__(self, folder: Path, tensors: tuple[UploadTensor, ...], part_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._place = {
            # to ask for its size each time is a tenth of what reading a tensor takes
            tensor.name: InStream(tensor, offset, tensor.nbytes)
            for tensor, offset in tensor_offsets(tensors)
        }
        self._paths: dict[int, Path] = {}
        self._data: dict[int, memoryview | None] = {}
        self._buffers = ThreadBuffers()

    def add(self, part: int, digest: str, received: Path, data: memoryview | None = None) -> Path | None:
        """Take in a file as the whole part.

        ``data``: what it holds, to be read instead until ``forget``.
        Returns the file of other bytes that was the part until now.
        """
        replaced, path = self._paths.get(part), take_in(self._folder, part, digest, received)
        self._paths[part], self._data[part] = path, data
        return replaced

    def forget(self, part: int) -> None:
        """Read a part from its file from now on."""
        self._data[part] = None

    def is_registered(self, part: int) -> bool:
        """Whether it is in memory that is registered with a GPU."""
        data = self._data[part]
        return data is not None and is_registered(torch.frombuffer(data, dtype=torch.uint8))

    def nbytes_of(self, name: str) -> int:
        """Bytes of one tensor."""
        return self._place[name].nbytes

    def parts_of(self, name: str) -> range:
        """The parts that hold bytes of one tensor."""
        _, offset, nbytes = self._place[name]
        first = offset // self._part_bytes
        return range(first, max(first, -(-(offset + nbytes) // self._part_bytes)))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each of these tensors, from its parts, which must all be there. Raises OSError.

        One that lies within a part that is in memory is read where it is. Others lie in one buffer, which this thread's
        next call uses again: be done with them by then.
        """
        return self._read(names, lambda _: None, None)

    def reading(
        self, room: Callable[[UploadTensor], memoryview | None], gpu: torch.device | None
    ) -> Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]:
        """A function that reads as ``read`` does, but puts tensors together where they are wanted.

        Args:
            room: where a tensor is stored that is stored as it came, uint8 [nbytes]; None: it is not. One that several
                parts hold is put together there.
            gpu: what is in registered memory is copied there, on the current stream, which the parts must outlast.
                Of tensors above ``BATCH_BYTES`` only matrices without a room. None: all lie in the host's memory.
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
        sizes = [_room_for(place.wanted.nbytes) if place.needs_buffer else 0 for place in places]
        buffer, start = self._buffers.take(sum(sizes)), 0
        for place, size in zip(places, sizes, strict=True):
            tensor, offset, _ = place.wanted
            if place.is_registered:
                yield next(on_gpu)
            elif place.view is not None:
                yield tensor.name, place.view
            elif place.room is not None:
                yield tensor.name, self._assembled(tensor, offset, place.room, in_blocks=False)
            else:
                # blocks of the stream become blocks of the buffer, unless parts end, or elements begin, at odd places
                in_blocks = self._part_bytes % BLOCK_BYTES == 0 and offset % DTYPE_BYTES[tensor.dtype] == 0
                room_in_buffer = buffer[start : start + size]
                yield tensor.name, self._assembled(tensor, offset, room_in_buffer, in_blocks=in_blocks)
            start += size

    def _place_of(
        self, name: str, room: Callable[[UploadTensor], memoryview | None], registered: RegisteredParts | None
    ) -> "_Place":
        wanted = self._place[name]
        tensor, offset, nbytes = wanted
        # the quantizer takes a large matrix to the GPU as a whole, but neither what is not quantized nor experts
        may = nbytes <= BATCH_BYTES or (len(tensor.shape) == 2 and room(tensor) is None)
        if may and registered is not None and nbytes and registered.hold(wanted):
            return _Place(wanted, None, None, is_registered=True)
        return _Place(wanted, self._view(tensor, offset), room(tensor), is_registered=False)

    def _spans(self, tensor: UploadTensor, offset: int) -> Iterator["_Span"]:
        """The pieces of parts that make up a tensor, in order."""
        position, end = offset, offset + tensor.nbytes
        while position < end:
            part, first = divmod(position, self._part_bytes)
            count = min(self._part_bytes - first, end - position)
            yield _Span(part, first, position - offset, count)
            position += count

    def _view(self, tensor: UploadTensor, offset: int) -> torch.Tensor | None:
        """None if it does not lie in one piece of memory, at a place where its elements may be."""
        part, first = divmod(offset, self._part_bytes)
        data, itemsize = self._data.get(part), DTYPE_BYTES[tensor.dtype]
        if data is None or not tensor.nbytes or first + tensor.nbytes > self._part_bytes or first % itemsize:
            return None
        # of the whole memory, not a slice of it: it comes back when nobody refers to the former (``BufferPool``)
        return as_tensor(data, tensor.dtype, tensor.shape, first)

    def _assembled(self, tensor: UploadTensor, offset: int, room: memoryview, *, in_blocks: bool) -> torch.Tensor:
        """Put together in ``room``, which begins at a block and has room for the rest of blocks if ``in_blocks``."""
        lead = offset % BLOCK_BYTES if in_blocks else 0
        copies: list[_Copy] = []
        for span in self._spans(tensor, offset):
            start = span.start + lead
            if (data := self._data[span.part]) is not None:
                copies.append(_Copy(room[start : start + span.nbytes], data, span.first))
                continue
            inside = span.first % BLOCK_BYTES if in_blocks else 0
            target = room[start - inside :][: round_up(inside + span.nbytes) if in_blocks else span.nbytes]
            with DirectFile.open(self._paths[span.part]) as file:
                if not file.read(target, inside + span.nbytes, span.first - inside):
                    raise OSError(f"{self._paths[span.part]} is shorter than when it came")
        if tensor.nbytes < STRETCH_BYTES:
            for copy in copies:
                _copy(copy)
        else:
            for _ in in_threads(_copy, copies):
                pass
        return as_tensor(room, tensor.dtype, tensor.shape, lead)


class _Span(NamedTuple):
    """A piece of a tensor that one part holds."""

    part: int
    first: int
    """Its first byte, counted from the part's."""
    start: int
    """Likewise, from the tensor's."""
    nbytes: int


class _Place(NamedTuple):
    """Where one tensor of a call is read from and to."""

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
    """All of a part's memory, which comes back when nobody refers to this object any more (``BufferPool``)."""
    first: int


def _copy(copy: _Copy) -> None:
    # not by assigning to a slice: Python keeps its lock for that, and every connection would wait
    target = np.frombuffer(copy.target, np.uint8)
    np.copyto(target, np.frombuffer(copy.data, np.uint8, count=target.nbytes, offset=copy.first))


def _room_for(nbytes: int) -> int:
    # it may begin and end inside a block
    return round_up(nbytes) + BLOCK_BYTES


def _digest_of(path: Path) -> str | None:
    """None for a file that cannot be read."""
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(16 << 20):
                hasher.update(chunk)
    except OSError as error:
        logger.warning("%s cannot be read, and its part is asked for again: %s", path, error)
        return None
    return hasher.hexdigest()
