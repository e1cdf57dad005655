"""Main loop of the receiver process: join the group, receive broadcasts, copy tensors into the shared memory.

It does one thing at a time and keeps no state between announcements, so it may be killed at any time. The messages come
through a pipe that no other process can open.
"""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch

from rollout_service.engine.processes import die_with_parent
from rollout_service.ingest.receiver.links import Link, join
from rollout_service.protocol.ring import Ring, aligned
from rollout_service.protocol.weight_transfer import TensorsToCome, TransferBackend, TransferInit, broadcasts, total
from rollout_service.runtime.groups import groups_of
from rollout_service.runtime.shared_memory import SharedMemory

BATCH_BYTES = 64 << 20
"""Maximum size in bytes of a batch, unless a single tensor is larger. The ingest converts several batches at once."""


@dataclass(frozen=True)
class Join:
    """Become a rank of this group. The first message; answered by ``JOINED``."""

    init: TransferInit
    backend: TransferBackend


@dataclass(frozen=True)
class Receive:
    """Receive these broadcasts. Answered by ``Filled`` for each batch, and by ``RECEIVED``."""

    tensors: TensorsToCome


@dataclass(frozen=True)
class Free:
    """The oldest ``batches`` filled batches are no longer read."""

    batches: int


@dataclass(frozen=True)
class Filled:
    """A batch lies in the shared memory: place in the announcement and offset in bytes of each tensor."""

    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrainerThere:
    """False: the trainer and its store are gone. None: there is no store to ask."""

    there: bool | None


@dataclass(frozen=True)
class Failed:
    """The group is unusable, and the process ends."""

    reason: str


class Signal(Enum):
    """The messages without content."""

    ASK_TRAINER = auto()
    """Check that the trainer still serves the group's store. Answered by ``TrainerThere``."""
    LEAVE = auto()
    """Leave the group and end."""
    JOINED = auto()
    """The process has joined the group."""
    RECEIVED = auto()
    """Every broadcast of the announcement has been received."""


ToProcess: TypeAlias = Join | Receive | Free | Signal
FromProcess: TypeAlias = Filled | TrainerThere | Failed | Signal
Pipe: TypeAlias = Any
"""``multiprocessing.connection.Connection``, which has type parameters only in typeshed."""


def run(pipe: Pipe, process: int, descriptor: int, name: str) -> None:
    """Run the process. The other arguments name memory of the ingest's: see ``SharedMemory.open``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the service, which ends this process
    try:
        first = pipe.recv()
        assert isinstance(first, Join), first
        memory = SharedMemory.open(process, descriptor, name)
        link = join(first.init, first.backend)
        pipe.send(Signal.JOINED)
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
            while (message := self._pipe.recv()) is not Signal.LEAVE:
                self._obey(message)
        finally:
            self._link.leave()

    def _obey(self, message: object) -> None:
        if isinstance(message, Free):
            self._ring.give_back(message.batches)
        elif message is Signal.ASK_TRAINER:
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
        self._pipe.send(Signal.RECEIVED)

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] on the link's device; the next broadcast reuses it."""
        if self._buffer.nbytes < nbytes:
            del self._buffer  # free it before the larger one is allocated
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)
        return self._buffer[:nbytes]

    def _hand_on(self, received: torch.Tensor, places: Sequence[int], sizes: Sequence[int]) -> None:
        start = 0
        for batch in groups_of(places, lambda place: aligned(sizes[place]), BATCH_BYTES):
            position = self._take(sum(aligned(sizes[place]) for place in batch))
            filled = []
            for place in batch:
                nbytes = sizes[place]
                if nbytes:
                    room = self._memory.view[position : position + nbytes]
                    torch.frombuffer(room, dtype=torch.uint8).copy_(received[start : start + nbytes])
                filled.append((place, position))
                start, position = start + nbytes, position + aligned(nbytes)
            self._pipe.send(Filled(tuple(filled)))

    def _take(self, nbytes: int) -> int:
        """Reserve a range of the shared memory, once the ingest has given back enough. Return its offset."""
        while (start := self._ring.take(nbytes)) is None:
            self._obey(self._pipe.recv())
        return start


def _typed(received: torch.Tensor, tensors: TensorsToCome, place: int) -> torch.Tensor:
    """View a tensor that is broadcast by itself in its own dtype, which NCCL requires to match on all ranks."""
    dtype: torch.dtype = getattr(torch, tensors.dtype_names[place])
    return received.view(dtype).view(math.prod(tensors.shapes[place]))
