"""What the ingest and its receiver process say to each other, through a pipe that nobody else can open."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from rollout_service.protocol.weight_transfer import TensorsToCome, TransferBackend, TransferInit

# --- to the process


@dataclass(frozen=True)
class Join:
    """Become a rank of this group. The first message; answered by ``Joined``."""

    init: TransferInit
    backend: TransferBackend


@dataclass(frozen=True)
class Receive:
    """Take these broadcasts. Answered by ``Filled`` for each batch, and ``Received``."""

    tensors: TensorsToCome
    ring_bytes: int
    """Size of the shared memory from now on; it may be larger than before."""


@dataclass(frozen=True)
class Free:
    """The batches filled first are read by nobody any more."""

    batches: int


@dataclass(frozen=True)
class Leave:
    """Let go of the group and end."""


@dataclass(frozen=True)
class AskTrainer:
    """Does the trainer that serves the group's store still do so? Answered by ``TrainerThere``."""


# --- from the process


@dataclass(frozen=True)
class Joined:
    """The group is there."""


@dataclass(frozen=True)
class Filled:
    """A batch lies in the shared memory: places of its tensors in the announcement, and where each begins."""

    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Received:
    """Every broadcast of the announcement has been taken."""


@dataclass(frozen=True)
class TrainerThere:
    """False: its store is gone, and so is the trainer. None: there is no store to ask."""

    there: bool | None


@dataclass(frozen=True)
class Failed:
    """The group is of no use any more, and the process ends."""

    reason: str


ToProcess: TypeAlias = Join | Receive | Free | AskTrainer | Leave
FromProcess: TypeAlias = Joined | Filled | Received | TrainerThere | Failed
Pipe: TypeAlias = Any
"""``multiprocessing.connection.Connection``, whose type parameters are typeshed's alone."""
