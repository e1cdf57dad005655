"""Memory next to a worker's model that the next version is read into while the engine serves."""

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rollout_service.threads import in_threads, io_threads
from rollout_service.weights.manifest import Manifest, StoredTensor, read_manifest

logger = logging.getLogger(__name__)

StagingKind = Literal["device", "host"]
ALIGNMENT_BYTES = 256
PIECE_BYTES = 16 << 20
"""Of a file, that one thread reads at a time. On its way to a device it goes through pinned memory, of which each
thread has twice as much: one half is read into while the other is copied."""
_SLACK_BYTES = 16 << 20
"""For alignment, and for what a version holds and the model does not: a tied head."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Staged:
    """A version that lies in the area."""

    folder: Path
    manifest: Manifest
    offsets: dict[str, int]
    """File → where its first tensor lies in the area."""
    layout: str
    """Equal for versions of equal names, dtypes, shapes and places in the area."""


@dataclass(frozen=True)
class _Piece:
    """Some bytes of a file, and where in the area they belong."""

    path: Path
    offset: int
    target: torch.Tensor

    def read_into(self, memory: torch.Tensor) -> None:
        """``memory``: as large as the target, on the CPU."""
        view = memoryview(memory.numpy().data)
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(self.offset)
            while view.nbytes:
                count = stream.readinto(view)
                if not count:
                    raise ValueError(f"{self.path} ends {view.nbytes} bytes early")
                view = view[count:]


class StagingArea:
    """Holds one version: ``device`` memory, from which it is loaded at the GPU's speed, or pinned ``host`` memory."""

    def __init__(self, kind: StagingKind, model: torch.nn.Module, device: torch.device) -> None:
        parameters = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
        nbytes = sum(parameters.values()) + _SLACK_BYTES
        self._device = device
        if kind == "device":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._reader = ThreadPoolExecutor(1, "stage")
        self._reading: Future[Staged] | None = None

    def start(self, folder: Path) -> None:
        """Begin to read a version's files, in a thread of its own. What was staged before is gone."""
        self.finish()
        self._reading = self._reader.submit(self._read, folder)

    def is_done(self) -> bool:
        """Whether the reading has ended. Raises what ended it, if it failed."""
        if self._reading is None:
            return True
        if not self._reading.done():
            return False
        self._reading.result()
        return True

    def finish(self) -> None:
        """Wait until nothing is read any more."""
        if self._reading is not None:
            wait([self._reading])

    def staged(self, folder: Path) -> Staged | None:
        """The version in ``folder``, if it lies here completely."""
        if self._reading is None or not self._reading.done() or self._reading.exception() is not None:
            return None
        staged = self._reading.result()
        return staged if staged.folder == folder else None

    def tensors(self, staged: Staged) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the version, as views of the area."""
        for tensor, start in _places(staged.manifest, staged.offsets):
            view = self.memory[start : start + tensor.nbytes].view(_DTYPES[tensor.dtype]).view(tensor.shape)
            yield tensor.name, view

    def _read(self, folder: Path) -> Staged:
        manifest = read_manifest(folder)
        offsets, position = {}, 0
        for file, tensors in manifest.files().items():
            offsets[file] = position
            nbytes = tensors[-1].offset + tensors[-1].nbytes - tensors[0].offset
            position += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if position > self.memory.numel():
            raise ValueError(
                f"version {manifest.version} has {position} bytes, and the staging area {self.memory.numel()}: "
                "it holds more than the model has"
            )
        pieces = [
            piece
            for file, tensors in manifest.files().items()
            for piece in self._pieces(folder / file, tensors, offsets[file])
        ]
        threads, lane = io_threads(), self._fill if self.memory.device.type == "cpu" else self._bounce
        list(in_threads(lane, [pieces[first::threads] for first in range(threads)]))
        return Staged(folder, manifest, offsets, layout_of(manifest, offsets))

    def _pieces(self, path: Path, tensors: list[StoredTensor], offset: int) -> Iterator[_Piece]:
        start, end = tensors[0].offset, tensors[-1].offset + tensors[-1].nbytes
        for first in range(start, end, PIECE_BYTES):
            place = offset + first - start
            yield _Piece(path, first, self.memory[place : place + min(PIECE_BYTES, end - first)])

    def _fill(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            piece.read_into(piece.target)

    def _bounce(self, pieces: list[_Piece]) -> None:
        halves = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        free = [torch.cuda.Event() for _ in halves]
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            for number, piece in enumerate(pieces):
                half = halves[number % 2][: piece.target.numel()]
                free[number % 2].synchronize()
                piece.read_into(half)
                piece.target.copy_(half, non_blocking=True)
                free[number % 2].record()
            torch.cuda.current_stream().synchronize()


def _places(manifest: Manifest, offsets: dict[str, int]) -> Iterator[tuple[StoredTensor, int]]:
    """Each tensor with its first byte in the area."""
    for file, tensors in manifest.files().items():
        for tensor in tensors:
            yield tensor, offsets[file] + tensor.offset - tensors[0].offset


def layout_of(manifest: Manifest, offsets: dict[str, int]) -> str:
    """A digest over what lies where."""
    digest = hashlib.sha256()
    for tensor, start in _places(manifest, offsets):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {start}\n".encode())
    return digest.hexdigest()
