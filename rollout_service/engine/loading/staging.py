"""The next version, read and checked while the engine serves: into memory next to the worker's model.

One reader: a worker checks the bytes that it will load from, in the memory that they are copied from (of a log in
memory, on the GPU: ``device_staging.py``), and rank 0 checks all others, so that the whole version was checked before
the engine closes. A version that cannot lie in the area is checked by rank 0 alone, and checked again as each worker
reads it while the engine is closed.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from rollout_service.engine.loading.copy_plan import CopyPlan
from rollout_service.engine.loading.device_staging import PASSAGE_BYTES, PASSAGES, copied_and_hashed, stage_on_device
from rollout_service.engine.loading.placement import Move, Placement, whole_span
from rollout_service.engine.loading.read_ahead import Copies, ReadAhead
from rollout_service.engine.loading.shared_memory import Busy, Content, SharedMemory
from rollout_service.engine.loading.staging_calls import StageAnswer
from rollout_service.errors import LogCorrupt
from rollout_service.gpu.pinning import pin
from rollout_service.gpu.streams import on_device
from rollout_service.protocol.tensors import StoredDtype
from rollout_service.runtime.memory import memory
from rollout_service.runtime.threads import in_threads, io_threads
from rollout_service.store.log import verify_tensors
from rollout_service.store.manifest import Manifest, ManifestDamaged, StoredTensor, read_manifest
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import Piece, VersionReader, pieces
from rollout_service.store.spare_files import SpareFiles

logger = logging.getLogger(__name__)

StagingKind = Literal["device", "host", "memory"]
"""``device`` memory, from which a version is loaded at the GPU's speed; pinned ``host`` memory, which the replicas of a
node share; for engines on a CPU, plain ``memory``, which is taken for each version anew."""
PIECE_BYTES = 8 << 20
"""Of a file, that one thread reads at a time. On its way to a device it goes through pinned memory, of which each
thread has four times as much: one half is read into and checked while the other is copied."""
_SLACK_BYTES = 16 << 20
"""For alignment, and for what a version holds and the model does not."""
_DTYPES: dict[StoredDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class CannotStage(Exception):
    """A version does not go into the area, and why; the engine can load it from its files all the same."""


@dataclass(frozen=True)
class Staged:
    """A version that was read and checked."""

    folder: Path
    manifest: Manifest
    layout: str
    """``TensorPlaces.slots_digest``."""
    placement: Placement | None
    """What of it lies in the area; None: nothing."""
    is_whole: bool = False
    """Whether that is every tensor."""
    refused: str | None = None
    """Why nothing lies there."""
    ahead_bytes: int = 0
    """That had been read before the version was committed."""


class Stager:
    """One worker's: reads in a thread of its own; of an upload to a log in memory, what is there before its commit."""

    def __init__(self, area: "StagingBuffer | None", rank: int, refused: str | None = None) -> None:
        """``rank``: of this engine's workers. ``refused``: why there is no area, if one was asked for."""
        self._area, self._rank, self._refused = area, rank, refused
        self._thread = ThreadPoolExecutor(1, "stage")
        self._reading: Future[Staged] | None = None
        self._asked: tuple[Path, str | None] | None = None
        self._asking = threading.Lock()
        self._ahead: ReadAhead | None = None
        self._ahead_before: ReadAhead | None = None
        self._reading_ahead: Future[None] | None = None

    def stage(self, folder: Path, digest: str | None, plan: CopyPlan | None) -> StageAnswer:
        """Read a version as ``plan`` loads it; nothing is left of the one before. Any thread may call it.

        ``digest``: of the manifest that is meant; None: whichever is there. What was staged and not loaded is not read
        again. Raises what ended the reading, but for a LogCorrupt.
        """
        with self._asking:
            reading = self._started(folder, digest, plan)
        try:
            return StageAnswer(refused=reading.result().refused)
        except LogCorrupt as error:
            return StageAnswer(corrupt=(error.message, error.detail))

    def _started(self, folder: Path, digest: str | None, plan: CopyPlan | None) -> Future[Staged]:
        if (folder, digest) == self._asked and digest is not None and self._reading and not self._failed():
            return self._reading
        self._asked = folder, digest
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
        self._reading = self._thread.submit(self._read, folder, digest, plan, ahead)
        return self._reading

    def staged(self, folder: Path) -> Staged | None:
        """The version in ``folder``, if it was read and checked."""
        if self._reading is None or not self._reading.done() or self._failed():
            return None
        staged = self._reading.result()
        return staged if staged.folder == folder else None

    def loaded(self, plan: CopyPlan | None) -> None:
        """The version was loaded, and the next one will be as ``plan`` says: of that one, read what is uploaded."""
        staged = None if self._asked is None else self.staged(self._asked[0])
        self.forget()
        if self._area is None or staged is None or plan is None or plan.layout != staged.layout:
            return
        before = self._ahead_before
        self._ahead = self._area.ahead_of(staged, plan.placement, every=self._rank == 0, before=before)
        self._ahead_before = self._ahead
        if self._ahead is not None:
            self._reading_ahead = self._thread.submit(self._read_ahead, self._ahead, staged.folder.parent)

    def forget(self) -> None:
        """Nothing of what was read will be loaded any more."""
        self.finish()
        self._reading = self._asked = None
        if self._area is not None:
            self._area.release()

    def finish(self) -> None:
        """Wait until nothing is read any more; what was read of an upload is forgotten."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        if self._reading_ahead is not None:
            wait([self._reading_ahead])
        if self._reading is not None:
            wait([self._reading])

    def _failed(self) -> bool:
        return self._reading is not None and self._reading.done() and self._reading.exception() is not None

    def _read_ahead(self, ahead: ReadAhead, root: Path) -> None:
        assert self._area is not None
        try:
            if SpareFiles.are_kept_in(root):
                self._area.register(SpareFiles(root), ahead.is_stopped)
                ahead.run(root, self._area.copying)
        except (OSError, torch.OutOfMemoryError) as error:
            logger.warning("a version is read once it is committed, and not before: %s", error)

    def _read(self, folder: Path, digest: str | None, plan: CopyPlan | None, ahead: ReadAhead | None) -> Staged:
        if self._reading_ahead is not None:
            self._reading_ahead.result()  # raises what was not expected
        try:
            manifest = read_manifest(folder)
            if digest not in (None, manifest.digest):
                raise LogCorrupt(f"{folder} holds a version with digest {manifest.digest}, not {digest}")
            return self._into_area(folder, manifest, plan, ahead)
        except (OSError, ManifestDamaged) as error:
            raise LogCorrupt(f"{folder} cannot be read: {error}") from error

    def _into_area(self, folder: Path, manifest: Manifest, plan: CopyPlan | None, ahead: ReadAhead | None) -> Staged:
        layout = manifest.places.slots_digest
        try:
            if self._area is None:
                raise CannotStage(self._refused or "engine.staging is none")
            planned = plan is not None and plan.layout == layout
            placement = plan.placement if plan is not None and planned else Placement.whole(manifest)
            self._area.fill(folder, manifest, placement, every=self._rank == 0, ahead=ahead)
            ahead_bytes = 0 if ahead is None else ahead.read_bytes
            return Staged(folder, manifest, layout, placement, is_whole=not planned, ahead_bytes=ahead_bytes)
        except CannotStage as refusal:
            if self._rank == 0:
                verify_tensors(manifest, folder)
            return Staged(folder, manifest, layout, None, refused=str(refusal))


class StagingBuffer:
    """Holds what one worker needs of one version."""

    def __init__(
        self, kind: StagingKind, model: torch.nn.Module, device: torch.device, rank: int = 0, workers: int = 1
    ) -> None:
        """``rank`` of ``workers`` of one engine, who share the machine's cores. Raises CannotStage without memory."""
        self._device, self._threads = device, max(1, io_threads() // workers)
        self._shard = f"{rank}of{workers}"
        self._taken_anew = kind == "memory"
        self._shared: SharedMemory | None = None
        self._mapped = MappedFiles(pin) if kind == "device" else None
        self.limit_bytes = None if self._taken_anew else area_bytes(model)
        """How large it is; None: as large as the version."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        """uint8 [bytes]. In host memory it is taken for the first version: who follows the same log shares it."""
        self._passages: list[torch.Tensor] = []
        if kind == "device":
            # one allocation, which sleeps as a whole, and in which passages begin at aligned addresses
            sizes = [PASSAGE_BYTES] * PASSAGES + [area_bytes(model)]
            *self._passages, self.memory = _taken(sum(sizes), device, pinned=False).split(sizes)

    def ahead_of(
        self, loaded: Staged, placement: Placement, *, every: bool, before: ReadAhead | None
    ) -> ReadAhead | None:
        """What reads the version after ``loaded`` while it is uploaded; None where that is not possible.

        Arguments as for ``fill`` and ``ReadAhead``.
        """
        if self._mapped is None:
            return None
        return ReadAhead(loaded.manifest, placement, PASSAGE_BYTES, every=every, before=before)

    def fill(
        self, folder: Path, manifest: Manifest, placement: Placement, *, every: bool, ahead: ReadAhead | None = None
    ) -> None:
        """Read what ``placement`` holds, and check it in the memory that it is copied from, or stays in.

        ``every``: check all other bytes of the version, too. ``ahead``: may have read some of it. Raises CannotStage,
        LogCorrupt naming tensor, chunk and file, or OSError.
        """
        if self.limit_bytes is None:
            self.memory = _taken(placement.nbytes, None, pinned=False)
        elif placement.nbytes > self.limit_bytes:
            raise CannotStage(
                f"{placement.nbytes} bytes of version {manifest.version} would lie in the staging area, which has "
                f"{self.limit_bytes}"
            )
        elif not self.memory.numel():
            self._take_host_memory(folder.parent, self.limit_bytes)
        if self._shared is None:
            self._read(folder, manifest, placement, every=every, ahead=ahead)
            return
        wanted = Content(digest=manifest.digest, placement=placement.digest, every=every)
        try:
            self._shared.hold(wanted, lambda: self._read(folder, manifest, placement, every=every))
        except Busy as reason:
            raise CannotStage(str(reason)) from reason

    def _take_host_memory(self, log: Path, nbytes: int) -> None:
        """The node's, shared by all replicas that follow the log; if that cannot be had, memory of this worker."""
        free = memory().free_bytes
        try:
            self._shared = SharedMemory(f"{shared_name(log)}-{self._shard}", nbytes)
        except OSError as error:
            logger.warning("this worker stages in memory of its own, not in its node's: %s", error)
            self.memory = _taken(nbytes, None, pinned=self._device.type == "cuda")
            return
        if self._shared.is_new and nbytes > free:
            self._shared = None
            raise CannotStage(f"there are no {nbytes} bytes of memory to stage in: {free} are free on this machine")
        self.memory = self._shared.area
        if self._device.type != "cuda":
            return
        try:
            with torch.cuda.device(self._device):
                pin(self.memory.numpy().data)
        except OSError as error:
            raise CannotStage(str(error)) from error

    def register(self, spare: SpareFiles, is_stopped: Callable[[], bool]) -> None:
        """Register the files of the next versions with CUDA, which takes 0.3 s a GB. Raises OSError."""
        assert self._mapped is not None
        with on_device(self._device):
            self._mapped.add(spare.paths(), is_stopped)

    @contextmanager
    def copying(self, folder: Path, manifest: Manifest, placement: Placement) -> Iterator[Copies]:
        """Of pieces of an upload, to the area."""
        assert self._mapped is not None
        self._mapped.prune()
        with on_device(self._device), VersionReader(folder, manifest, self._mapped, uploaded=True) as reader:
            yield lambda found: copied_and_hashed(reader, found, placement, self.memory, self._passages)

    def _read(
        self, folder: Path, manifest: Manifest, placement: Placement, *, every: bool, ahead: ReadAhead | None = None
    ) -> None:
        with self._reader(folder, manifest) as reader:
            most_bytes = PASSAGE_BYTES if reader.is_mapped else PIECE_BYTES
            found: Iterable[Piece] = pieces(placement.chunks(manifest, every=every), most_bytes)
            if not self._taken_anew and any(t.nbytes > most_bytes and not t.chunk_digests for t in manifest.tensors):
                raise CannotStage(
                    f"the manifest of version {manifest.version} has no digests of chunks, as an older release wrote it"
                )
            if reader.is_mapped:
                if ahead is not None and ahead.placement is placement:
                    found = ahead.left_of(manifest)
                try:
                    stage_on_device(reader, found, placement, self.memory, self._passages)
                except torch.OutOfMemoryError as error:  # for the tables of what is hashed, some 100 bytes a MiB
                    raise CannotStage(f"the GPU has no memory to check version {manifest.version}: {error}") from error
                return
            all_found = list(found)
            lanes = [all_found[first :: self._threads] for first in range(self._threads)]
            work = [(self._lane(), lane) for lane in lanes if lane]  # all memory before anything is read
            list(in_threads(lambda each: _run(each[0], reader, placement, each[1]), work))

    def _reader(self, folder: Path, manifest: Manifest) -> VersionReader:
        """Which maps the files if they are used again: then each is registered with CUDA once."""
        if self._mapped is None or not SpareFiles.are_kept_in(folder.parent):
            return VersionReader(folder, manifest)
        self._mapped.prune()
        try:
            with on_device(self._device):
                return VersionReader(folder, manifest, self._mapped)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("versions are staged by way of other memory, which takes longer: %s", error)
            self._mapped = None
            return VersionReader(folder, manifest)

    def _lane(self) -> "_Lane":
        if not self.memory.is_cuda:
            return _Fill(self.memory)
        with on_device(self._device):
            return _ToDevice(self.memory, self._device)

    def release(self) -> None:
        """Its content is not needed any more. No GPU may still read it, since other processes may write there now."""
        if self._taken_anew:
            self.memory = torch.empty(0, dtype=torch.uint8)
        if self._shared is not None:
            self._shared.release()

    def tensors(self, manifest: Manifest, placement: Placement) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of a version that lies here whole, as views."""
        for tensor in manifest.in_order():
            start = placement.places[whole_span(tensor)]
            yield tensor.name, tensor_view(self.memory[start : start + tensor.nbytes], tensor)


def area_bytes(model: torch.nn.Module) -> int:
    """Of the area that takes what one worker loads: as much as its parameters, shared ones once."""
    parameters = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(parameters.values()) + _SLACK_BYTES


def shared_name(log: Path) -> str:
    """What the names of areas begin with that those have in common who follow a log."""
    return hashlib.sha256(str(log).encode()).hexdigest()[:16]


def tensor_view(memory: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor whose bytes are ``memory``, uint8 [nbytes]."""
    return memory.view(_DTYPES[tensor.dtype]).view(tensor.shape)


class _Lane(Protocol):
    """What one thread has to itself."""

    def read(self, reader: VersionReader, piece: Piece, moves: list[Move]) -> None: ...
    def end(self) -> None: ...


def _run(lane: _Lane, reader: VersionReader, placement: Placement, found: list[Piece]) -> None:
    for piece in found:
        lane.read(reader, piece, placement.moves(piece))
    lane.end()


class _Fill:
    """Into an area that the CPU can write: straight to its place, unless only parts of the piece belong there."""

    def __init__(self, area: torch.Tensor) -> None:
        self._area = area.numpy()
        self._buffer = np.empty(0, np.uint8)

    def read(self, reader: VersionReader, piece: Piece, moves: list[Move]) -> None:
        if len(moves) == 1 and (moves[0].source, moves[0].row_bytes, moves[0].rows) == (0, piece.nbytes, 1):
            target = moves[0].target
            reader.read(piece, self._area[target : target + piece.nbytes].data)
            return
        if len(self._buffer) < piece.nbytes:
            self._buffer = np.empty(max(PIECE_BYTES, piece.nbytes), np.uint8)
        reader.read(piece, self._buffer.data)
        for move in moves:
            _rows(self._area, move.target, move, move.row_bytes)[:] = _rows(
                self._buffer, move.source, move, move.stride_bytes
            )

    def end(self) -> None:
        """Nothing is under way."""


class _ToDevice:
    """Into an area on a device, by way of pinned memory, where it is checked.

    Contiguous runs are copied from where they were checked; parts of rows are packed in a buffer first, so that the
    copies to the device are few, and need no kernel, which the engine's own would wait for.
    """

    def __init__(self, area: torch.Tensor, device: torch.device) -> None:
        self._area, self._device = area, device
        self._buffers = [(_pinned(PIECE_BYTES), _pinned(PIECE_BYTES)) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]
        self._stream = torch.cuda.Stream(device)
        self._turn = 0

    def read(self, reader: VersionReader, piece: Piece, moves: list[Move]) -> None:
        (read, packed), free = self._buffers[self._turn], self._free[self._turn]
        self._turn = 1 - self._turn
        free.synchronize()
        reader.read(piece, read.numpy().data)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for target, held in packed_runs(moves, read, packed, self._stream.synchronize):
                self._area[target : target + held.numel()].copy_(held, non_blocking=True)
            free.record()

    def end(self) -> None:
        self._stream.synchronize()


def packed_runs(
    moves: list[Move], read: torch.Tensor, packed: torch.Tensor, before_reuse: Callable[[], object]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of bytes, each with its place in the area: parts of ``read``, or of ``packed`` where many moves make one.

    ``before_reuse`` is called when ``packed`` is full, before what was yielded of it is overwritten.
    """
    position = 0
    for run in _neighbours(moves, packed.numel()):
        if len(run) == 1 and run[0].rows == 1:
            yield run[0].target, read[run[0].source : run[0].source + run[0].row_bytes]
            continue
        nbytes = sum(move.rows * move.row_bytes for move in run)
        if position + nbytes > packed.numel():  # some bytes of the piece are needed more than once
            before_reuse()
            position = 0
        start = position
        for move in run:
            source = _rows(read.numpy(), move.source, move, move.stride_bytes)
            _rows(packed.numpy(), position, move, move.row_bytes)[:] = source
            position += move.rows * move.row_bytes
        yield run[0].target, packed[start:position]


def _neighbours(moves: list[Move], most_bytes: int) -> Iterator[list[Move]]:
    """Moves whose targets follow one another, up to ``most_bytes``."""
    run: list[Move] = []
    end = nbytes = 0
    for move in moves:
        size = move.rows * move.row_bytes
        if run and (move.target != end or nbytes + size > most_bytes):
            yield run
            run, nbytes = [], 0
        run.append(move)
        nbytes, end = nbytes + size, move.target + size
    if run:
        yield run


def _rows(memory: np.ndarray, start: int, move: Move, stride_bytes: int) -> np.ndarray:
    """uint8 [rows, row_bytes]: a view."""
    if move.rows == 1:
        return memory[start : start + move.row_bytes][None, :]
    return np.lib.stride_tricks.as_strided(memory[start:], (move.rows, move.row_bytes), (stride_bytes, 1))


def _pinned(nbytes: int) -> torch.Tensor:
    return _taken(nbytes, None, pinned=True)


def _taken(nbytes: int, device: torch.device | None, *, pinned: bool) -> torch.Tensor:
    where = f"{device} memory" if device is not None else "pinned memory" if pinned else "memory"
    try:
        if device is not None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:  # torch has no narrower one for memory that the driver refuses
        raise CannotStage(f"there are no {nbytes} bytes of {where} to stage in: {error}") from error
