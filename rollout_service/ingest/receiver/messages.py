"""Messages between the ingest and its receiver process, through a pipe that no other process can open."""

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
    """Receive these broadcasts. Answered by ``Filled`` for each batch, and by ``Received``."""

    tensors: TensorsToCome


@dataclass(frozen=True)
class Free:
    """The oldest ``batches`` filled batches are no longer read."""

    batches: int


@dataclass(frozen=True)
class Leave:
    """Leave the group and end."""


@dataclass(frozen=True)
class AskTrainer:
    """Check that the trainer still serves the group's store. Answered by ``TrainerThere``."""


# --- from the process


@dataclass(frozen=True)
class Joined:
    """The process has joined the group."""


@dataclass(frozen=True)
class Filled:
    """A batch lies in the shared memory: place in the announcement and offset in bytes of each tensor."""

    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Received:
    """Every broadcast of the announcement has been received."""


@dataclass(frozen=True)
class TrainerThere:
    """False: the trainer and its store are gone. None: there is no store to ask."""

    there: bool | None


@dataclass(frozen=True)
class Failed:
    """The group is unusable, and the process ends."""

    reason: str


ToProcess: TypeAlias = Join | Receive | Free | AskTrainer | Leave
FromProcess: TypeAlias = Joined | Filled | Received | TrainerThere | Failed
Pipe: TypeAlias = Any
"""``multiprocessing.connection.Connection``, which has type parameters only in typeshed."""
