"""Progress of running calls, reported by a replica to the gateway that sent them.

A gateway polls each replica that runs its calls, and each poll acknowledges the previous reply. A replica therefore
keeps nothing for a gateway that does not poll, and repeats a reply that was lost.
"""

from pydantic import Field

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Completion


class ProgressAsk(Frozen):
    """One poll of a replica by a gateway."""

    replica_id: str
    """The polled replica: the router sends the poll there, if Serve still knows that replica."""
    origin: str
    """The gateway, as in ``GenerateCall``."""
    acknowledged: int = Field(default=0, ge=0)
    """Number of the last reply that arrived; 0: none."""
    queued: int = Field(default=0, ge=0)
    """Sequences waiting in the gateway, divided by the number of polled replicas: for the autoscaler."""


class Piece(Frozen):
    """New tokens of one completion of a call."""

    call: int
    """``GenerateCall.number``."""
    start: int = Field(ge=0)
    """Number of tokens of this generation before these."""
    made: Completion
    """These tokens alone; spans count from the first of them. ``finish_reason`` is "abort" while generation runs."""


class ProgressReply(Frozen):
    """Tokens generated since the reply that the poll acknowledges."""

    number: int
    pieces: tuple[Piece, ...]
