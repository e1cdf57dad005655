"""Tensors in memory that a trainer on this machine shares: read where they lie, and converted as they come."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from rollout_service.errors import InvalidRequest, NotShared
from rollout_service.ingest.sources.source import as_tensor, in_batches
from rollout_service.protocol.upload import SHARED_ALIGNMENT, SharedMemorySource, SharedTensors, UploadTensor
from rollout_service.shared_memory import SharedMemory, machine
from rollout_service.store.mapped_files import Registered

_MOST_MEMORIES = 16
"""Trainers' memories that stay mapped."""


@dataclass(frozen=True)
class _Opened:
    memory: SharedMemory
    source: SharedMemorySource
    unregister: Callable[[], None] | None

    def close(self) -> None:
        if self.unregister is not None:
            self.unregister()
        self.memory.close()


class TrainerMemory:
    """The memories of trainers that are mapped here, by name. Threads may share it."""

    def __init__(self, registered: Registered | None = None) -> None:
        """``registered``: registers memory with the GPU that quantizes; None: there is none."""
        self._registered = registered
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()

    def open(self, source: SharedMemorySource) -> memoryview:
        """All bytes of it. Raises NotShared, with the reason."""
        with self._lock:
            opened = self._opened.get(source.memory)
            if opened is None:
                try:
                    opened = self._opened[source.memory] = self._open(source)
                except OSError as error:
                    raise NotShared(
                        f"the trainer's memory cannot be read here: {error}. Send the tensors in parts",
                        {"process": source.process},
                    ) from error
            return opened.memory.view

    def _open(self, source: SharedMemorySource) -> _Opened:
        if (here := machine()) != source.machine:
            raise OSError(f"the trainer runs on another machine ({source.machine}, and this is {here})")
        if len(self._opened) >= _MOST_MEMORIES:
            raise OSError(f"the memories of {len(self._opened)} trainers are mapped already")
        memory = SharedMemory.open(source.process, source.descriptor, source.memory)
        return _Opened(memory, source, None if self._registered is None else self._registered(memory.view))

    @staticmethod
    def is_there(source: SharedMemorySource) -> bool:
        """Whether the trainer still has it."""
        try:
            SharedMemory.open(source.process, source.descriptor, source.memory).close()
        except OSError:
            return False
        return True

    def prune(self, used: Collection[str]) -> None:
        """Let go of memory that its trainer has given up, or that has ended; not of that under the names ``used``."""
        with self._lock:
            for name, opened in list(self._opened.items()):
                if name not in used and not self.is_there(opened.source):
                    self._opened.pop(name).close()

    def close(self) -> None:
        """Let go of all of it. Nothing may be read from it any more."""
        with self._lock:
            for opened in self._opened.values():
                opened.close()
            self._opened = {}


class SharedBatch:
    """The tensors of one ``SharedTensors``."""

    def __init__(self, source: SharedMemorySource, batch: SharedTensors, memory: memoryview) -> None:
        """Raises InvalidRequest for a name that was not announced, or a place outside the memory."""
        announced = {tensor.name: tensor for tensor in source.tensors}
        self._places: dict[str, tuple[UploadTensor, int]] = {}
        self._memory = memory
        for shared in batch.tensors:
            tensor = announced.get(shared.name)
            if tensor is None or shared.name in self._places:
                why = "was not announced" if tensor is None else "comes twice"
                raise InvalidRequest(f"{shared.name} {why}", {"tensor": shared.name})
            if shared.offset % SHARED_ALIGNMENT or shared.offset + tensor.nbytes > memory.nbytes:
                raise InvalidRequest(
                    f"{shared.name} has {tensor.nbytes} bytes from {shared.offset} on: tensors begin at multiples of "
                    f"{SHARED_ALIGNMENT}, and the memory has {memory.nbytes} bytes",
                    {"tensor": shared.name, "offset": shared.offset, "memory_bytes": memory.nbytes},
                )
            self._places[shared.name] = tensor, shared.offset

    def groups(self, nbytes: int) -> Iterator[list[str]]:
        """The names, in lists of about ``nbytes``, which different threads convert."""
        return in_batches(((name, tensor.nbytes) for name, (tensor, _) in self._places.items()), nbytes)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the shared memory."""
        for name in names:
            tensor, offset = self._places[name]
            yield name, as_tensor(self._memory[offset : offset + tensor.nbytes], tensor.dtype, tensor.shape)
