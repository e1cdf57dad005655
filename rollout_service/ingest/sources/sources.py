"""Where the tensors of a version come from: a folder of safetensors, or the parts of an upload."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
import xxhash

from rollout_service.errors import Forbidden, InvalidManifest, InvalidRequest, NotFound
from rollout_service.ingest.sources.foreign_file import SourceFile
from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.protocol.upload import DTYPE_BYTES, SourceDtype, UploadTensor, tensor_offsets
from rollout_service.quant.blockwise import BLOCK
from rollout_service.store.direct_io import BLOCK_BYTES, DirectFile, ThreadBuffers, round_up

logger = logging.getLogger(__name__)
_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_PART_FILE = re.compile(r"part-([0-9]{6,})\.([0-9a-f]{32})")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def allowed_path(path: Path, roots: tuple[Path, ...]) -> Path:
    """``path`` with symbolic links followed, if it lies below one of ``roots``; raises Forbidden otherwise.

    Raises InvalidRequest for what is no path at all: a null byte, a loop of links.
    """
    try:
        resolved = path.resolve()
    except (ValueError, OSError, RuntimeError) as error:
        raise InvalidRequest(f"source.path {str(path)!r} cannot be followed: {error}") from error
    if not any(resolved.is_relative_to(root) for root in roots):
        allowed = ", ".join(map(str, roots)) or "none is configured"
        raise Forbidden(f"{path} is not below weights.source_roots ({allowed}): put the weights there, or upload them")
    return resolved


class FolderSource:
    """A Hugging Face folder of safetensors, unquantized or published in blockwise FP8.

    Raises NotFound or InvalidManifest when it cannot be one.

    ``roots``: where its files must lie once links are followed, or Forbidden is raised; None: anywhere.
    """

    def __init__(self, folder: Path, roots: tuple[Path, ...] | None = None) -> None:
        files = _safetensors_files(folder)
        if roots is not None:
            for file in files:
                allowed_path(file, roots)
        self._file_of: dict[str, SourceFile] = {}
        self.table = tuple(tensor for file in files for tensor in self._described(SourceFile(file)))
        """Names, dtypes and shapes of all tensors, file by file."""
        self._entries = {tensor.name: tensor for tensor in self.table}
        self._buffers = ThreadBuffers()
        if any(tensor.dtype == "float8_e4m3fn" for tensor in self.table):
            _require_our_blocks(folder / "config.json", roots)

    def batches(self, batch_bytes: int) -> Iterator[list[str]]:
        """Names of all tensors, file by file, in lists of about ``batch_bytes``."""
        names: list[str] = []
        nbytes = 0
        for name in self._file_of:
            names.append(name)
            nbytes += self._entries[name].nbytes
            if nbytes >= batch_bytes:
                yield names
                names, nbytes = [], 0
        if names:
            yield names

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each of these tensors. Raises InvalidManifest if its file was changed since the table was read, or OSError.

        They lie in one buffer, which this thread's next call uses again: be done with them by then. Block scales in
        BF16, which some publish, are widened to the float32 that they are stored in.
        """
        names = list(names)
        sizes = [self._file_of[name].tensors[name].nbytes for name in names]
        room = self._buffers.take(sum(map(round_up, sizes)))
        for file, of_file in groupby(zip(names, sizes, strict=True), key=lambda item: self._file_of[item[0]]):
            with file.reading() as reader:
                for name, nbytes in of_file:
                    data, room = room[:nbytes], room[round_up(nbytes) :]
                    reader.read(name, data)
                    yield name, self._tensor(name, data)

    def _tensor(self, name: str, data: memoryview) -> torch.Tensor:
        tensor = self._file_of[name].tensors[name]
        if not data.nbytes:
            return torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
        read = torch.frombuffer(data, dtype=_TORCH[tensor.dtype]).view(tensor.shape)
        return read.float() if _is_widened(name, tensor.dtype) else read

    def _described(self, file: SourceFile) -> Iterator[UploadTensor]:
        for name, tensor in file.tensors.items():
            self._file_of[name] = file
            dtype: SourceDtype = "float32" if _is_widened(name, tensor.dtype) else tensor.dtype
            yield UploadTensor(name=name, dtype=dtype, shape=tensor.shape)


def _safetensors_files(folder: Path) -> list[Path]:
    try:
        if not folder.is_dir():
            raise NotFound(f"{folder} is not a folder that the ingest can see")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidManifest(f"{folder} must hold *.safetensors, but {_instead(folder)}")
    except OSError as error:
        raise NotFound(f"{folder} cannot be read: {error}") from error
    for file in files:
        if not file.is_file():  # opening a named pipe would wait for ever
            raise InvalidManifest(f"{file} is not a file, or a link to nowhere")
    return files


def _is_widened(name: str, dtype: SourceDtype) -> bool:
    return name.endswith(SCALE_SUFFIX) and dtype == "bfloat16"


def _require_our_blocks(config: Path, roots: tuple[Path, ...] | None) -> None:
    """Compare what a folder of codes says of itself; one that says nothing is judged by its tensors alone."""
    if not config.is_file():
        return
    if roots is not None:
        allowed_path(config, roots)
    try:
        said = json.loads(config.read_bytes()).get("quantization_config") or {}
        method, block = said.get("quant_method", "fp8"), said.get("weight_block_size", [BLOCK, BLOCK])
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidManifest(f"{config} does not say how its codes are to be read: {error}") from error
    if method != "fp8" or block != [BLOCK, BLOCK]:
        raise InvalidManifest(
            f"{config.parent} holds FP8 codes with quant_method={method} and weight_block_size={block}; the engines "
            f"load fp8 in blocks of {BLOCK}×{BLOCK}: give the unquantized weights",
            {"quant_method": method, "weight_block_size": block},
        )


def _instead(folder: Path) -> str:
    pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in _PICKLES]
    if pickles:
        return f"it holds pickles ({', '.join(pickles[:4])}), which are never opened: save with safe_serialization=True"
    return "it holds none"


class PartFiles:
    """The parts of an upload on disk, and the tensors that can be read from them."""

    def __init__(self, folder: Path, tensors: tuple[UploadTensor, ...], part_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._place = {tensor.name: (tensor, offset) for tensor, offset in tensor_offsets(tensors)}
        self._paths: dict[int, Path] = {}
        self._data: dict[int, memoryview | None] = {}
        self._buffers = ThreadBuffers()

    def add(self, part: int, digest: str, received: Path, data: memoryview | None = None) -> Path | None:
        """Take in a file as the whole part. Its name keeps the digest, so that a restart can check what it finds.

        ``data``: what it holds, to be read instead until ``forget``.
        Returns the file of other bytes that was the part until now.
        """
        replaced, path = self._paths.get(part), self._folder / f"part-{part:06d}.{digest}"
        received.replace(path)
        self._paths[part], self._data[part] = path, data
        return replaced

    def forget(self, part: int) -> None:
        """Read a part from its file from now on."""
        self._data[part] = None

    def left_behind(self) -> Iterator[tuple[int, str, Path]]:
        """Number, digest and file of each part that an earlier process took in and that is still what it was.

        Others are removed, to be sent again. Raises OSError for one that cannot be.
        """
        found: dict[int, list[tuple[str, Path]]] = defaultdict(list)
        for path in sorted(self._folder.glob("part-*")):
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

    def parts_of(self, name: str) -> range:
        """The parts that hold bytes of one tensor."""
        tensor, offset = self._place[name]
        first = offset // self._part_bytes
        return range(first, max(first, -(-(offset + tensor.nbytes) // self._part_bytes)))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each of these tensors, assembled from its parts, which must all be there. Raises OSError.

        They lie in one buffer, which this thread's next call uses again: be done with them by then.
        """
        places = [self._place[name] for name in names]
        sizes = [_room_for(tensor.nbytes) for tensor, _ in places]
        buffer, start = self._buffers.take(sum(sizes)), 0
        for name, size, (tensor, offset) in zip(names, sizes, places, strict=True):
            yield name, self._assembled(tensor, offset, buffer[start : start + size])
            start += size

    def _assembled(self, tensor: UploadTensor, offset: int, room: memoryview) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
        # blocks of the stream become blocks of the buffer, unless parts end, or elements begin, at odd places
        in_blocks = self._part_bytes % BLOCK_BYTES == 0 and offset % DTYPE_BYTES[tensor.dtype] == 0
        lead = offset % BLOCK_BYTES if in_blocks else 0
        position, end = offset, offset + tensor.nbytes
        while position < end:
            part, first = divmod(position, self._part_bytes)
            count = min(self._part_bytes - first, end - position)
            start = position - offset + lead
            if (data := self._data[part]) is not None:
                room[start : start + count] = data[first : first + count]
            else:
                inside = first % BLOCK_BYTES if in_blocks else 0
                target = room[start - inside :][: round_up(inside + count) if in_blocks else count]
                with DirectFile.open(self._paths[part]) as file:
                    if not file.read(target, inside + count, first - inside):
                        raise OSError(f"{self._paths[part]} is shorter than when it came")
            position += count
        return torch.frombuffer(room[lead : lead + tensor.nbytes], dtype=_TORCH[tensor.dtype]).view(tensor.shape)


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
