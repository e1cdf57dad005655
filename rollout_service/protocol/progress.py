"""What calls that run have made so far, as a replica tells the gateway that sent them.

A gateway asks each replica that has calls of its own, over and over; each question acknowledges the answer before it.
So nothing is kept for a gateway that does not ask, and an answer that got lost is given again.
"""

from pydantic import Field

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Completion


class ProgressAsk(Frozen):
    """A gateway's question to one replica."""

    replica_id: str
    """The replica that is meant: the router brings it there if it is still one of Serve's."""
    origin: str
    """The gateway, as in ``GenerateCall``."""
    acknowledged: int = Field(default=0, ge=0)
    """Number of the last answer that arrived; 0: none."""
    queued: int = Field(default=0, ge=0)
    """Sequences that wait in the gateway, divided by the replicas that it asks: for the autoscaler."""


class Piece(Frozen):
    """More of one completion of a call."""

    call: int
    """``GenerateCall.number``."""
    start: int = Field(ge=0)
    """How many tokens of this generation came before."""
    made: Completion
    """These tokens alone; its spans count from the first of them. ``finish_reason`` is "abort" while it goes on."""


class ProgressReply(Frozen):
    """What was made since the answer that the question acknowledged."""

    number: int
    pieces: tuple[Piece, ...]
