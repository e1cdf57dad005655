"""What every message between processes is: a frozen pydantic model, plain JSON on the wire.

Nothing in this package imports torch, vllm or ray: trainer, gateway, ingest, replicas and monitor share it.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_VERSION = 2**53 - 1
"""Weight versions are JSON numbers and values of metrics, which others read as doubles: beyond this those are not exact
(RFC 8259, section 6)."""


class Frozen(BaseModel):
    """Base of every noun: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


WeightVersion = Annotated[int, Field(ge=0, le=MAX_VERSION)]
"""A weight version that comes from outside."""


class Failure(Frozen):
    """An error that was kept to be shown."""

    type: str
    """Class in ``rollout_service.errors``."""
    message: str
