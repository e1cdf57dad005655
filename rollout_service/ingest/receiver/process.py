"""Main loop of the receiver process: join the group, receive broadcasts, copy tensors into the shared memory.

It does one thing at a time and keeps no state between announcements, so it may be killed at any time.
"""

import math
import signal
from collections.abc import Iterator, Sequence

import torch

from rollout_service.engine.parent_death import die_with_parent
from rollout_service.ingest.receiver.links import Link, join
from rollout_service.ingest.receiver.messages import (
    AskTrainer,
    Failed,
    Filled,
    Free,
    Join,
    Joined,
    Leave,
    Pipe,
    Receive,
    Received,
    TrainerThere,
)
from rollout_service.protocol.ring import Ring, aligned
from rollout_service.protocol.weight_transfer import TensorsToCome, broadcasts, total
from rollout_service.runtime.shared_memory import SharedMemory

BATCH_BYTES = 64 << 20
"""Maximum size in bytes of a batch, unless a single tensor is larger. The ingest converts several batches at once."""


def run(pipe: Pipe, process: int, descriptor: int, name: str) -> None:
    """Run the process. The other arguments name memory of the ingest's: see ``SharedMemory.open``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the service, which ends this process
    try:
        first = pipe.recv()
        assert isinstance(first, Join), first
        memory = SharedMemory.open(process, descriptor, name)
        link = join(first.init, first.backend)
        pipe.send(Joined())
        Rank(pipe, link, memory, first).serve()
    except EOFError:  # the ingest has closed its end
        return
    except (RuntimeError, OSError, ValueError) as error:
        pipe.send(Failed(str(error)))


class Rank:
    """One rank of a trainer's group, once it has joined."""

    def __init__(self, pipe: Pipe, link: Link, memory: SharedMemory, joined: Join) -> None:
        self._pipe, self._link, self._memory = pipe, link, memory
        self._init = joined.init
        self._ring = Ring(memory.nbytes)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=link.device)

    def serve(self) -> None:
        """Handle messages until the ingest sends Leave. Raises EOFError if the ingest ends without one."""
        try:
            while not isinstance(message := self._pipe.recv(), Leave):
                self._obey(message)
        finally:
            self._link.leave()

    def _obey(self, message: object) -> None:
        if isinstance(message, Free):
            self._ring.give_back(message.batches)
        elif isinstance(message, AskTrainer):
            self._pipe.send(TrainerThere(self._link.trainer_is_there()))
        elif isinstance(message, Receive):
            self._receive(message)
        else:
            raise ValueError(f"{message} is nothing that this process can be told")

    def _receive(self, message: Receive) -> None:
        tensors = message.tensors
        sizes = tensors.sizes
        packed = self._init.packed if tensors.packed is None else tensors.packed
        buffer_bytes = tensors.packed_buffer_size_bytes or self._init.packed_buffer_size_bytes
        for places in broadcasts(sizes, buffer_bytes if packed else None):
            received = self._room(total(sizes, places))
            if received.nbytes:  # NCCL does not support broadcasts of zero bytes
                self._link.broadcast(received if packed else _typed(received, tensors, places[0]))
            self._hand_on(received, places, sizes)
        self._pipe.send(Received())

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] on the link's device; the next broadcast reuses it."""
        if self._buffer.nbytes < nbytes:
            del self._buffer  # free it before the larger one is allocated
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)
        return self._buffer[:nbytes]

    def _hand_on(self, received: torch.Tensor, places: Sequence[int], sizes: Sequence[int]) -> None:
        start = 0
        for batch in _batches(places, sizes):
            room = sum(aligned(sizes[place]) for place in batch)
            position = self._take(room)
            filled = []
            for place in batch:
                self._copy(received[start : start + sizes[place]], position)
                filled.append((place, position))
                start, position = start + sizes[place], position + aligned(sizes[place])
            self._pipe.send(Filled(tuple(filled)))

    def _take(self, nbytes: int) -> int:
        """Reserve a range of the shared memory, once the ingest has given back enough. Return its offset."""
        while (start := self._ring.take(nbytes)) is None:
            self._obey(self._pipe.recv())
        return start

    def _copy(self, data: torch.Tensor, position: int) -> None:
        if data.nbytes:
            room = self._memory.view[position : position + data.nbytes]
            torch.frombuffer(room, dtype=torch.uint8).copy_(data)


def _batches(places: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for place in places:
        size = aligned(sizes[place])
        if batch and nbytes + size > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(place)
        nbytes += size
    if batch:
        yield batch


def _typed(received: torch.Tensor, tensors: TensorsToCome, place: int) -> torch.Tensor:
    """View a tensor that is broadcast by itself in its own dtype, which NCCL requires to match on all ranks."""
    dtype: torch.dtype = getattr(torch, tensors.dtype_names[place])
    return received.view(dtype).view(math.prod(tensors.shapes[place]))
