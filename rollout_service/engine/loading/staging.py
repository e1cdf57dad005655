"""Read and check the next version into memory beside a worker's model, while the engine serves.

A worker checks its bytes in the memory from which they are loaded or copied. For an in-memory log, that is on the GPU
(``device_staging.py``). Rank 0 checks all other bytes, so that the whole version is checked before the engine pauses. A
version that does not fit into the staging buffer is checked by rank 0 alone. Each worker checks it again while it reads
it with the engine paused.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rollout_service.engine.loading.copy_plan import CopyPlan
from rollout_service.engine.loading.device_staging import BOUNCE_BUFFERS, BOUNCE_BYTES, copy_and_hash
from rollout_service.engine.loading.placement import Move, Placement, whole_span
from rollout_service.engine.loading.read_ahead import CopyPieces, ReadAhead
from rollout_service.engine.loading.staging_calls import StageAnswer
from rollout_service.errors import LogCorrupt
from rollout_service.gpu.pinning import pin, take_host_memory
from rollout_service.gpu.streams import on_device
from rollout_service.protocol.fleet import Staging
from rollout_service.runtime.memory import memory
from rollout_service.runtime.threads import in_threads, io_threads
from rollout_service.store.log import verify_tensors
from rollout_service.store.manifest import Manifest, ManifestDamaged, StoredTensor, read_manifest
from rollout_service.store.mapped_files import MappedFiles, SpareFiles
from rollout_service.store.reading import Piece, VersionReader, pieces

logger = logging.getLogger(__name__)

StagingKind = Literal["device", "host", "memory"]
"""Memory of the staging buffer. ``device``: GPU memory, loaded at the GPU's speed. ``host``: pinned memory. ``memory``:
plain memory for CPU engines, allocated for each version."""
PIECE_BYTES = 8 << 20
"""Bytes of a file that a thread reads at a time. On the way to a device they pass through pinned memory. Each thread
has four times as much: one half is read and checked while the other half is copied."""
_SLACK_BYTES = 16 << 20
"""Extra bytes for alignment, and for data in a version that the model does not have."""
_MAX_CACHE_SHARE = 0.4
"""Maximum share of the KV cache that ``engine.staging: auto`` takes for a buffer on the GPU. One in host memory makes
each update's pause ten times as long, and rollouts seldom fill a GPU's whole KV cache."""
_HOST_BYTES_PER_S = 50e9
"""Rate of loading from pinned memory: 9.4 GB in 0.19 s on an H200 with PCIe 5.0
(benchmarks/results/h200/update_engine.json)."""


class CannotStage(Exception):
    """Raised when a version does not fit into the staging buffer, with the reason. The engine can still load it from
    files."""


@dataclass(frozen=True)
class Staged:
    """A version that was read and checked."""

    folder: Path
    manifest: Manifest
    layout: str
    """The layout digest, ``TensorPlaces.slots_digest``."""
    placement: Placement | None
    """The layout of its bytes in the staging buffer. None: it is not there."""
    is_whole: bool = False
    """True if the buffer holds every tensor."""
    refused: str | None = None
    """The reason why it is not in the buffer."""
    ahead_bytes: int = 0
    """Bytes that were read before the version was committed."""


class Stager:
    """Stages versions for one worker in its own thread. Begins to read an upload to an in-memory log before its
    commit."""

    def __init__(self, area: "StagingBuffer | None", rank: int, refused: str | None = None) -> None:
        """``rank``: the worker's in this engine. ``refused``: why there is no buffer ``area``, if one was requested."""
        self._area, self._rank, self._refused = area, rank, refused
        self._thread = ThreadPoolExecutor(1, "stage")
        self._reading: Future[Staged] | None = None
        self._asked: tuple[Path, str | None] | None = None
        self._asking = threading.Lock()
        self._ahead: ReadAhead | None = None
        self._ahead_before: ReadAhead | None = None
        self._reading_ahead: Future[None] | None = None

    def stage(self, folder: Path, digest: str | None, plan: CopyPlan | None) -> StageAnswer:
        """Read a version for ``plan``, replacing the previous one. Thread-safe.

        A version that is already staged and not loaded is not read again. Raises the error that ended reading, except
        LogCorrupt, which the answer contains.

        ``digest``: the digest of the expected manifest. None: any.
        """
        with self._asking:
            reading = self._reading
            if reading is None or digest is None or (folder, digest) != self._asked or self._has_failed():
                self._asked = folder, digest
                ahead, self._ahead = self._ahead, None
                if ahead is not None:
                    ahead.stop()
                reading = self._reading = self._thread.submit(self._read, folder, digest, plan, ahead)
        try:
            return StageAnswer(refused=reading.result().refused)
        except LogCorrupt as error:
            return StageAnswer(corrupt=(error.message, error.detail))

    def staged(self, folder: Path) -> Staged | None:
        """Return the version in ``folder`` if it was read and checked, else None."""
        if self._reading is None or not self._reading.done() or self._has_failed():
            return None
        staged = self._reading.result()
        return staged if staged.folder == folder else None

    def loaded(self, plan: CopyPlan | None) -> None:
        """Mark the staged version as loaded, and start to read the next upload, which ``plan`` will load."""
        staged = None if self._asked is None else self.staged(self._asked[0])
        self.forget()
        if self._area is None or staged is None or plan is None or plan.layout != staged.layout:
            return
        if self._area.may_map:
            ahead = ReadAhead(
                staged.manifest, plan.placement, BOUNCE_BYTES, every=self._rank == 0, before=self._ahead_before
            )
            self._ahead = self._ahead_before = ahead
            self._reading_ahead = self._thread.submit(self._read_ahead, ahead, staged.folder.parent)
        else:
            self._ahead_before = None

    def forget(self) -> None:
        """Discard the staged version."""
        self.finish()
        self._reading = self._asked = None
        if self._area is not None:
            self._area.release()

    def finish(self) -> None:
        """Wait until nothing is being read. Data read from an upload is discarded."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        if self._reading_ahead is not None:
            wait([self._reading_ahead])
        if self._reading is not None:
            wait([self._reading])

    def _has_failed(self) -> bool:
        return self._reading is not None and self._reading.done() and self._reading.exception() is not None

    def _read_ahead(self, ahead: ReadAhead, root: Path) -> None:
        assert self._area is not None
        try:
            if SpareFiles.are_kept_in(root):
                self._area.register(SpareFiles(root), ahead.is_stopped)
                ahead.run(root, self._area.open_copies)
        except (OSError, torch.OutOfMemoryError) as error:
            logger.warning("a version is read once it is committed, and not before: %s", error)

    def _read(self, folder: Path, digest: str | None, plan: CopyPlan | None, ahead: ReadAhead | None) -> Staged:
        if self._reading_ahead is not None:
            self._reading_ahead.result()  # raises unexpected errors
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
    """Holds the bytes of one version that one worker loads."""

    def __init__(self, kind: StagingKind, model: torch.nn.Module, device: torch.device, workers: int = 1) -> None:
        """Allocate the buffer. ``workers``: those of the engine, which share the host's cores. Raises CannotStage."""
        self._device, self._threads = device, max(1, io_threads() // workers)
        self._taken_anew = kind == "memory"
        self._mapped = MappedFiles(pin) if kind == "device" else None
        self.limit_bytes = None if self._taken_anew else area_bytes(model)
        """Size in bytes. None: the size of the version."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        """The buffer, uint8 [bytes]."""
        self._bounce_buffers: list[torch.Tensor] = []
        if kind == "device":
            # one allocation, which sleep mode releases as a whole, and in which bounce buffers have aligned addresses
            sizes = [BOUNCE_BYTES] * BOUNCE_BUFFERS + [area_bytes(model)]
            *self._bounce_buffers, self.memory = _allocate(sum(sizes), device=device).split(sizes)
        elif self.limit_bytes is not None:
            self.memory = _take_host_memory(self.limit_bytes, device)

    @property
    def may_map(self) -> bool:
        """True if files of a log in memory are mapped, and so can be read before their version is committed."""
        return self._mapped is not None

    def fill(
        self, folder: Path, manifest: Manifest, placement: Placement, *, every: bool, ahead: ReadAhead | None = None
    ) -> None:
        """Read the bytes of ``placement``, and check them in the memory that they are copied from or stay in.

        Raises CannotStage, OSError, or LogCorrupt, which names tensor, chunk and file.

        Args:
            folder, manifest: the version.
            placement: the layout of the buffer.
            every: True to check all other bytes of the version, too.
            ahead: a reader that may have read some of the version.
        """
        if self.limit_bytes is None:
            self.memory = _allocate(placement.nbytes)
        elif placement.nbytes > self.limit_bytes:
            raise CannotStage(
                f"{placement.nbytes} bytes of version {manifest.version} would lie in the staging area, which has "
                f"{self.limit_bytes}"
            )
        with self._reader(folder, manifest) as reader:
            most_bytes = BOUNCE_BYTES if reader.is_mapped else PIECE_BYTES
            found = pieces(placement.chunks(manifest, every=every), most_bytes)
            if reader.is_mapped:
                if ahead is not None and ahead.placement is placement:
                    found = iter(ahead.remaining_pieces(manifest))
                try:
                    for batch, digests in copy_and_hash(reader, found, placement, self.memory, self._bounce_buffers):
                        reader.require([entry for piece in batch for entry in piece.chunks], digests)
                except torch.OutOfMemoryError as error:  # the hash tables need about 100 bytes per MiB
                    raise CannotStage(f"the GPU has no memory to check version {manifest.version}: {error}") from error
                return
            all_found = list(found)
            parts = [all_found[first :: self._threads] for first in range(self._threads)]
            work = [(self._lane(), part) for part in parts if part]  # allocates all memory before anything is read

            def run(each: tuple[_Fill | _ToDevice, list[Piece]]) -> None:
                lane, part = each
                for piece in part:
                    lane.read(reader, piece, placement.moves(piece))
                lane.end()

            list(in_threads(run, work))

    def register(self, spare: SpareFiles, is_stopped: Callable[[], bool]) -> None:
        """Register the files of the next versions with CUDA, which takes 0.3 s per GB. Raises OSError."""
        assert self._mapped is not None
        with on_device(self._device):
            self._mapped.add(spare.paths(), is_stopped)

    @contextmanager
    def open_copies(self, folder: Path, manifest: Manifest, placement: Placement) -> Iterator[CopyPieces]:
        """Provide the function that copies pieces of an upload to the buffer."""
        assert self._mapped is not None
        self._mapped.prune()
        with on_device(self._device), VersionReader(folder, manifest, self._mapped, uploaded=True) as reader:
            yield lambda found: copy_and_hash(reader, found, placement, self.memory, self._bounce_buffers)

    def _reader(self, folder: Path, manifest: Manifest) -> VersionReader:
        """Return a reader that maps the files if they are reused, so that each is registered with CUDA once."""
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

    def _lane(self) -> "_Fill | _ToDevice":
        if not self.memory.is_cuda:
            return _Fill(self.memory)
        with on_device(self._device):
            return _ToDevice(self.memory, self._device)

    def release(self) -> None:
        """Release the content. No GPU may still read it."""
        if self._taken_anew:
            self.memory = torch.empty(0, dtype=torch.uint8)

    def tensors(self, manifest: Manifest, placement: Placement) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of a version that is whole in the buffer, as views."""
        for tensor in manifest.in_order():
            start = placement.places[whole_span(tensor)]
            yield tensor.name, tensor_view(self.memory[start : start + tensor.nbytes], tensor)


def area_bytes(model: torch.nn.Module) -> int:
    """Return the size of the buffer for one worker: its parameters, with shared ones counted once."""
    parameters = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return sum(parameters.values()) + _SLACK_BYTES


def tensor_view(memory: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """Return a stored tensor as a view of ``memory``, uint8 [nbytes]."""
    return memory.view(getattr(torch, tensor.dtype)).view(tensor.shape)


class _Fill:
    """Reads into a buffer that the CPU can write, directly unless only parts of the piece are needed."""

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
        """Do nothing: no copy is pending."""


class _ToDevice:
    """Reads into a buffer on a device through pinned memory, where the bytes are checked.

    Contiguous ranges are copied from the memory in which they were checked. Parts of rows are packed in a buffer first.
    The copies to the device are then few and need no kernel, which would wait for the engine's own.
    """

    def __init__(self, area: torch.Tensor, device: torch.device) -> None:
        self._area, self._device = area, device
        self._buffers = [[_allocate(PIECE_BYTES, pin_memory=True) for _ in range(2)] for _ in range(2)]
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
    """Yield byte ranges with their offsets in the staging buffer. They are parts of ``read``, or of ``packed`` for
    several moves.

    ``before_reuse`` is called when ``packed`` is full, before yielded ranges in it are overwritten.
    """
    position = 0
    for run in _coalesce(moves, packed.numel()):
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


def _coalesce(moves: list[Move], most_bytes: int) -> Iterator[list[Move]]:
    """Yield groups of moves with adjacent targets, of up to ``most_bytes`` each."""
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
    """Return a view uint8 [rows, row_bytes]."""
    if move.rows == 1:
        return memory[start : start + move.row_bytes][None, :]
    return np.lib.stride_tricks.as_strided(memory[start:], (move.rows, move.row_bytes), (stride_bytes, 1))


def _take_host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [nbytes], registered with a GPU for as long as this process lives."""
    if (free := memory().free_bytes) < nbytes:
        raise CannotStage(f"there are no {nbytes} bytes of memory to stage in: {free} are free on this machine")
    taken = take_host_memory(nbytes)  # torch's allocator rounds up to a power of two
    if device.type == "cuda":
        try:
            with torch.cuda.device(device):
                pin(taken)
        except OSError as error:
            raise CannotStage(str(error)) from error
    return torch.frombuffer(taken, dtype=torch.uint8)


def _allocate(nbytes: int, *, device: torch.device | None = None, pin_memory: bool = False) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    except RuntimeError as error:  # torch has no narrower error for memory that the driver refuses
        where = f"{device} memory" if device is not None else "pinned memory" if pin_memory else "memory"
        raise CannotStage(f"there are no {nbytes} bytes of {where} to stage in: {error}") from error


def choose_staging(area_bytes: int, cache_bytes: int, host_bytes: int, ranks: int) -> tuple[Staging, str]:
    """Return the kind of ``engine.staging: auto``, and the cost of each kind. A buffer on the GPU reduces the KV cache.

    Args:
        area_bytes: size of the buffer of a GPU, equal to its weights.
        cache_bytes: GPU memory for the KV cache and scratch memory without a buffer.
        host_bytes: free memory of the machine.
        ranks: GPUs of one engine, all on this machine. Each has a buffer of its own.
    """
    kind: Staging = "none"
    if 0 < area_bytes <= _MAX_CACHE_SHARE * cache_bytes:
        kind = "device"
    elif area_bytes * ranks <= host_bytes:
        kind = "host"
    share = min(1.0, area_bytes / cache_bytes) if cache_bytes > 0 else 1.0
    gb = f"{area_bytes / 1e9:.1f} GB"
    device = f"device: {gb}, {share:.0%} of the KV cache's {max(0, cache_bytes) / 1e9:.1f} GB"
    host = f"host: updates close the engine for {area_bytes / _HOST_BYTES_PER_S:.2f} s"
    if kind == "none":
        host = f"host: {gb} of memory for each GPU of an engine, and {host_bytes / 1e9:.1f} GB are free"
    return kind, f"engine.staging auto is {kind} ({device}; {host})"
