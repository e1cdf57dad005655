"""A folder of safetensors, readable by the ingest, as a source of weights.

Another process may change its files: the trainer may save its next checkpoint into the same folder at any moment. They
are therefore read, never mapped, and checked for changes at each read. If a mapped file shrinks, the process is killed
(SIGBUS). If a file is rewritten in place, two versions would be mixed.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from rollout_service.errors import Forbidden, InvalidManifest, InvalidRequest, NotFound
from rollout_service.ingest.sources.source import as_tensor
from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.model.weight_files import INDEX_FILE, weight_files
from rollout_service.protocol.base import wrong_fields
from rollout_service.protocol.ignored import NOTHING_IGNORED, IgnoredTensors
from rollout_service.protocol.upload import SourceDtype, UploadTensor
from rollout_service.quant.blockwise import BLOCK
from rollout_service.runtime.groups import groups_of
from rollout_service.store.buffers import ThreadBuffers, round_up
from rollout_service.store.reading import read_at
from rollout_service.store.upload_record import source_stamp

logger = logging.getLogger(__name__)
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_DTYPES: dict[str, SourceDtype] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def allowed_path(path: Path, roots: tuple[Path, ...]) -> Path:
    """Return ``path`` with symbolic links resolved. Raises Forbidden unless it lies below one of ``roots``.

    Raises InvalidRequest for an invalid path: a null byte, a loop of links.
    """
    try:
        resolved = path.resolve()
    except (ValueError, OSError, RuntimeError) as error:
        raise InvalidRequest(f"source.path {str(path)!r} cannot be followed: {error}") from error
    if not any(resolved.is_relative_to(root) for root in roots):
        allowed = ", ".join(map(str, roots)) or "none is configured"
        raise Forbidden(
            f"{path} is not below weights.source_roots ({allowed}): put the weights there, set it to a folder that the "
            "trainer writes into, or upload them"
        )
    return resolved


class Entry(NamedTuple):
    """One tensor in the header of a safetensors file."""

    name: str
    dtype: str
    """The name that safetensors gives it."""
    shape: tuple[int, ...]
    offset: int
    """Offset in the file, in bytes."""
    nbytes: int


class Header(NamedTuple):
    """The header of a safetensors file."""

    entries: list[Entry]
    """All tensors, in the order of their bytes."""
    metadata: dict[str, str]
    """The texts under ``__metadata__``."""
    nbytes: int
    """Size in bytes of the header itself."""
    stat: os.stat_result

    @classmethod
    def of(cls, path: Path) -> "Header":
        """Read the header of a file. Raises InvalidManifest for a file that is not safetensors or cannot be read."""
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                header = _header(file.fileno(), stat.st_size)
                entries = _entries(header, stat.st_size)
        except SafetensorError as error:
            raise InvalidManifest(f"{path} is not a safetensors file: {error}") from error
        except OSError as error:
            raise InvalidManifest(f"{path} cannot be read: {error}; make it readable for the service") from error
        return cls(entries, json.loads(header[8:]).get("__metadata__") or {}, len(header), stat)


class SourceFile:
    """A safetensors file. Its header is read at construction.

    Raises InvalidManifest for a file that is not safetensors, cannot be read, or holds an unsupported dtype.
    """

    def __init__(self, path: Path, ignored: IgnoredTensors = NOTHING_IGNORED) -> None:
        """``ignored``: tensors that are left out, whatever their dtype."""
        self.path = path
        self.ignored: list[str] = []
        """Names of the tensors that are left out."""
        self.tensors: dict[str, Entry] = {}
        """Tensors by name, in the order of their bytes, with the dtypes of a tensor table."""
        header = Header.of(path)
        self._stat = header.stat
        for entry in header.entries:
            if entry.name in ignored:
                self.ignored.append(entry.name)
                continue
            if entry.dtype not in _DTYPES:
                raise InvalidManifest(
                    f"{entry.name} in {path.name} is {entry.dtype}; the ingest takes {', '.join(_DTYPES)} and "
                    "quantizes itself",
                    {"tensor": entry.name, "dtype": entry.dtype},
                )
            self.tensors[entry.name] = entry._replace(dtype=_DTYPES[entry.dtype])

    def read(self, fd: int, name: str, room: memoryview, place: slice) -> None:
        """Fill ``room[place]`` with these bytes of a tensor. ``fd``: the open file. Raises InvalidManifest if the file
        was changed, or OSError."""
        wanted = room[place]
        done = read_at(fd, self.tensors[name].offset + place.start, wanted)
        before, now = self._stat, os.fstat(fd)  # after reading, so that a write before or during the read is detected
        if done < wanted.nbytes or _identity(now) != _identity(before):
            raise InvalidManifest(
                f"{name} was to be read from {self.path}, which has changed since its version was begun: "
                f"{before.st_size} bytes, modified at {before.st_mtime:.3f}, and {now.st_size} bytes, "
                f"modified at {now.st_mtime:.3f} now; leave the files of a source alone until its version is committed",
                {"tensor": name, "file": str(self.path)},
            )


class FolderSource:
    """A Hugging Face folder of safetensors, unquantized or in blockwise FP8. With an index, only the index's files are
    read.

    Raises NotFound or InvalidManifest for any other folder.

    ``roots``: folders that must contain its files once links are resolved, or Forbidden is raised; None: anywhere.
    ``ignored``: tensors that are left out.
    ``change``: fills a buffer with a tensor's bytes and changes them; called with its name, the buffer, and a function
    that reads a range of its bytes into the buffer.
    ``buffers``: holds the tensors of each thread; may be shared by sources that are read one after the other.
    """

    def __init__(
        self,
        folder: Path,
        roots: tuple[Path, ...] | None = None,
        ignored: IgnoredTensors = NOTHING_IGNORED,
        change: Callable[[str, memoryview, Callable[[slice], None]], None] | None = None,
        buffers: ThreadBuffers | None = None,
    ) -> None:
        files = safetensors_files(folder, roots)
        if roots is not None:
            for file in files:
                allowed_path(file, roots)
        self._file_of: dict[str, SourceFile] = {}
        sources = [SourceFile(file, ignored) for file in files]
        if left_out := ignored.summary(name for source in sources for name in source.ignored):
            logger.info("%s: %s", folder, left_out)
        self.table = tuple(tensor for source in sources for tensor in self._described(source))
        """Names, dtypes and shapes of all tensors, file by file."""
        self.names = {name for source in sources for name in (*source.tensors, *source.ignored)}
        """Names of all tensors, also of those that are left out."""
        self.stamp = source_stamp(folder)
        """Hash of the names, sizes and times of its files."""
        self._buffers = buffers or ThreadBuffers()
        self._change = change
        if any(tensor.dtype == "float8_e4m3fn" for tensor in self.table):
            _require_our_blocks(folder / "config.json", roots)

    def batches(self, batch_bytes: int) -> Iterator[list[str]]:
        """Yield the names of all tensors, file by file, in lists of about ``batch_bytes``."""
        several = groups_of(self.table, lambda tensor: tensor.nbytes, batch_bytes)
        return ([tensor.name for tensor in each] for each in several)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of these tensors. Raises InvalidManifest if its file has changed since the table was read, or
        OSError.

        The tensors share one buffer, which this thread's next call reuses, so finish using them first. Block scales in
        BF16, which some publishers use, are converted to float32, in which they are stored.
        """
        names = list(names)
        sizes = [self._file_of[name].tensors[name].nbytes for name in names]
        room = self._buffers.take(sum(map(round_up, sizes)))
        for file, of_file in groupby(zip(names, sizes, strict=True), key=lambda item: self._file_of[item[0]]):
            with file.path.open("rb", buffering=0) as opened:
                for name, nbytes in of_file:
                    data, room = room[:nbytes], room[round_up(nbytes) :]
                    fill = partial(file.read, opened.fileno(), name, data)
                    if self._change is None:
                        fill(slice(0, nbytes))
                    else:
                        self._change(name, data, fill)
                    entry = file.tensors[name]
                    read = as_tensor(data, entry.dtype, entry.shape)
                    yield name, read.float() if _is_widened(entry) else read

    def _described(self, file: SourceFile) -> Iterator[UploadTensor]:
        for name, entry in file.tensors.items():
            self._file_of[name] = file
            dtype = "float32" if _is_widened(entry) else entry.dtype
            try:
                described = UploadTensor.model_validate({"name": name, "dtype": dtype, "shape": entry.shape})
            except ValidationError as error:
                raise InvalidManifest(
                    f"{name!r} in {file.path} is no tensor of a model: {wrong_fields(error)}"
                ) from error
            yield described


def safetensors_files(folder: Path, roots: tuple[Path, ...] | None) -> list[Path]:
    """Return the files that ``weight_files`` selects; other files may hold the same tensors again.

    Raises NotFound, InvalidManifest, or Forbidden.
    """
    try:
        if not folder.is_dir():
            raise NotFound(f"{folder} is not a folder that the ingest can see")
        index = folder / INDEX_FILE
        if roots is not None:
            allowed_path(index, roots)
        # a dangling link is not a missing file: the error is raised below, with its name
        there = [path.name for path in folder.iterdir()]
        try:
            files = [folder / name for name in weight_files(there, index.read_bytes() if index.is_file() else None)]
        except ValueError as error:
            raise InvalidManifest(f"{folder}: {error}") from error
        if not files:
            raise InvalidManifest(f"{folder} must hold *.safetensors, but {_instead(folder)}")
    except OSError as error:
        raise NotFound(f"{folder} cannot be read: {error}") from error
    for file in files:
        if not file.is_file():  # opening a named pipe would wait forever
            raise InvalidManifest(f"{file} is not a file, or a link to nowhere")
    return files


def _is_widened(entry: Entry) -> bool:
    return entry.name.endswith(SCALE_SUFFIX) and entry.dtype == "bfloat16"


def _require_our_blocks(config: Path, roots: tuple[Path, ...] | None) -> None:
    """Compare the folder's ``quantization_config`` with ours; without one, only its tensors are checked."""
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


def _identity(stat: os.stat_result) -> tuple[int, int, int, int, int]:
    # also compare ctime, because tools can set mtime
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _header(fd: int, file_bytes: int) -> bytes:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(_MOST_HEADER_BYTES, file_bytes - 8):
        raise SafetensorError(f"a header of {length} bytes in a file of {file_bytes}")
    header = os.pread(fd, 8 + length, 0)
    if len(header) < 8 + length:
        raise SafetensorError(f"only {len(header)} of the {8 + length} bytes of its header could be read")
    return header


def _entries(header: bytes, file_bytes: int) -> list[Entry]:
    """Return all tensors, in the order of their bytes.

    The library maps the file that it opens. It therefore gets a copy with this header, and zeros in place of the data.
    """
    memory = os.memfd_create("safetensors-header")
    try:
        os.pwrite(memory, header, 0)
        os.ftruncate(memory, file_bytes)
        with safe_open(f"/proc/self/fd/{memory}", framework="pt") as reader:
            slices = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
            described = json.loads(header[8:])  # the library has validated it
            places = [described[name]["data_offsets"] for name, _ in slices]
            return [
                Entry(name, tensor.get_dtype(), tuple(tensor.get_shape()), len(header) + start, end - start)
                for (name, tensor), (start, end) in zip(slices, places, strict=True)
            ]
    finally:
        os.close(memory)
