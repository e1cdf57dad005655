"""Where the unquantized tensors of a version come from: a folder of safetensors, or the parts of an upload."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rollout_service.errors import Forbidden, InvalidManifest, InvalidRequest, NotFound
from rollout_service.weights.upload import SourceDtype, UploadTensor, tensor_offsets

_FROM_SAFETENSORS: dict[str, SourceDtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
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
    """A Hugging Face folder of safetensors. Raises NotFound or InvalidManifest when it cannot be one.

    ``roots``: where its files must lie once links are followed, or Forbidden is raised; None: anywhere.
    """

    def __init__(self, folder: Path, roots: tuple[Path, ...] | None = None) -> None:
        files = _safetensors_files(folder)
        if roots is not None:
            for file in files:
                allowed_path(file, roots)
        self._file_of: dict[str, Path] = {}
        self.table = tuple(tensor for file in files for tensor in self._read_header(file))
        """Names, dtypes and shapes of all tensors."""
        self._shapes = {tensor.name: tensor.shape for tensor in self.table}

    @property
    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises InvalidManifest if the files were changed since the table was read, or OSError."""
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as reader:
                tensor: torch.Tensor = reader.get_tensor(name)
        except SafetensorError as error:
            raise InvalidManifest(f"{name} is not in {file} any more: {error}") from error
        if tuple(tensor.shape) != self._shapes[name]:
            raise InvalidManifest(
                f"{name} in {file} was {list(self._shapes[name])} and is {list(tensor.shape)} now: leave the files of "
                "a source alone until its version is committed"
            )
        return tensor

    def _read_header(self, file: Path) -> Iterator[UploadTensor]:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    header = reader.get_slice(name)
                    self._file_of[name] = file
                    yield _described(name, header.get_dtype(), header.get_shape(), file)
        except (SafetensorError, OSError) as error:
            raise InvalidManifest(f"{file} is not a safetensors file: {error}") from error


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


def _described(name: str, dtype: str, shape: list[int], file: Path) -> UploadTensor:
    if dtype not in _FROM_SAFETENSORS:
        raise InvalidManifest(
            f"{name} in {file.name} is {dtype}; the ingest takes {', '.join(_FROM_SAFETENSORS)} and quantizes itself",
            {"tensor": name, "dtype": dtype},
        )
    return UploadTensor(name=name, dtype=_FROM_SAFETENSORS[dtype], shape=tuple(shape))


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

    def path(self, part: int) -> Path:
        """Where a part lies once it is whole."""
        return self._folder / f"part-{part:06d}"

    def parts_of(self, name: str) -> range:
        """The parts that hold bytes of one tensor."""
        tensor, offset = self._place[name]
        first = offset // self._part_bytes
        return range(first, max(first, -(-(offset + tensor.nbytes) // self._part_bytes)))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, assembled from its parts, which must all be there. Raises OSError."""
        tensor, offset = self._place[name]
        buffer = bytearray(tensor.nbytes)
        view, position = memoryview(buffer), offset
        while position < offset + tensor.nbytes:
            part, start = divmod(position, self._part_bytes)
            length = min(self._part_bytes - start, offset + tensor.nbytes - position)
            with self.path(part).open("rb") as stream:
                stream.seek(start)
                if stream.readinto(view[position - offset : position - offset + length]) != length:
                    raise OSError(f"{self.path(part)} is shorter than when it came")
            position += length
        if not buffer:
            return torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
        return torch.frombuffer(buffer, dtype=_TORCH[tensor.dtype]).view(tensor.shape)
