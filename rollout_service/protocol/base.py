"""What every message between processes is: a frozen pydantic model, plain JSON on the wire.

Nothing in this package imports torch, vllm or ray: trainer, gateway, ingest, replicas and monitor share it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_VERSION = 2**53 - 1
"""Weight versions are JSON numbers and values of metrics, which others read as doubles: beyond this those are not exact
(RFC 8259, section 6)."""


class Frozen(BaseModel):
    """Base of every noun: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields of ``update``, which are not validated."""
        copy = super().model_copy(update=update, deep=deep)
        # pydantic copies what cached properties have stored, which is of the fields before
        for name in copy.__dict__.keys() - type(self).model_fields:
            del copy.__dict__[name]
        return copy


WeightVersion = Annotated[int, Field(ge=0, le=MAX_VERSION)]
"""A weight version that comes from outside."""


_LABEL = "[0-9._:/@+=-]*[A-Za-z][A-Za-z0-9._:/@+=-]*"
_LONGEST_LABEL = 128
NEXT: Literal["next"] = "next"
"""In place of a number: the ingest gives the version one."""


def _is_no_keyword(label: str) -> str:
    if label == NEXT:
        raise ValueError(f"{NEXT!r} asks for a number, and is no label")
    return label


VersionLabel = Annotated[str, Field(max_length=_LONGEST_LABEL, pattern=f"^{_LABEL}$"), AfterValidator(_is_no_keyword)]
"""What a trainer calls a version beside its number, such as ``run-7/step-300``: letters, digits and ``._:/@+=-``, of
them at least one letter, so that it is never taken for a number. Several versions may have it: it then means the newest
of them."""
NewVersion = WeightVersion | Literal["next"]
"""The version of a push."""
KnownVersion = WeightVersion | VersionLabel
"""A version that was committed, by its number or its label."""


def is_label(text: str) -> bool:
    """Whether ``text`` may be a ``VersionLabel``."""
    return len(text) <= _LONGEST_LABEL and text != NEXT and re.fullmatch(_LABEL, text) is not None


class Failure(Frozen):
    """An error that was kept to be shown."""

    type: str
    """Class in ``rollout_service.errors``."""
    message: str
