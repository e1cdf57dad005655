"""Base class and common field types of the messages: frozen pydantic models, sent as plain JSON.

Nothing in this package imports torch, vllm or ray: trainer, gateway, ingest, replicas and monitor share it.
"""

import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

MAX_VERSION = 2**53 - 1
"""The largest weight version. JSON readers and metrics hold numbers as doubles, which are exact up to here (RFC 8259,
section 6)."""
FEW = 8
"""Number of things that an error names before it only counts the rest."""


class Frozen(BaseModel):
    """Base class of every message: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields of ``update``, which are not validated."""
        copy = super().model_copy(update=update, deep=deep)
        # pydantic also copies the values of cached properties, which were computed from the old fields
        for name in copy.__dict__.keys() - type(self).model_fields:
            del copy.__dict__[name]
        return copy


def refuse_bool(value: object) -> object:
    """Return the value. Raises ValueError for a boolean: pydantic reads true, and YAML's yes, as the number 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean (YAML's yes and no are)")
    return value


def takes_numbers(annotation: Any) -> bool:
    """Return True if a field of this type takes numbers and no booleans."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices]
    return bool not in kinds and (int in kinds or float in kinds)


WeightVersion = Annotated[int, Field(ge=0, le=MAX_VERSION), BeforeValidator(refuse_bool)]
"""A weight version received from outside."""


_LABEL = "[0-9._:/@+=-]*[A-Za-z][A-Za-z0-9._:/@+=-]*"
_LONGEST_LABEL = 128
NEXT: Literal["next"] = "next"
"""Placeholder for a version number: the ingest assigns the number."""


def _is_no_keyword(label: str) -> str:
    if label == NEXT:
        raise ValueError(f"{NEXT!r} asks for a number, and is no label")
    return label


VersionLabel = Annotated[str, Field(max_length=_LONGEST_LABEL, pattern=f"^{_LABEL}$"), AfterValidator(_is_no_keyword)]
"""A trainer's name for a version, such as ``run-7/step-300``: letters, digits and ``._:/@+=-``. At least one letter is
required, so that a label is never read as a number. Several versions may share a label; it then means the newest of
them."""
NewVersion = WeightVersion | Literal["next"]
"""The version of a push: a number, or ``next``."""
KnownVersion = WeightVersion | VersionLabel
"""A committed version, by its number or its label."""


def is_label(text: str) -> bool:
    """Return True if ``text`` is a valid ``VersionLabel``."""
    return len(text) <= _LONGEST_LABEL and text != NEXT and re.fullmatch(_LABEL, text) is not None


def is_token(text: str) -> bool:
    """Return True if ``text`` can be a bearer token: HTTP headers carry one word of printable ASCII."""
    return all("!" <= character <= "~" for character in text)


def field_name(location: tuple[int | str, ...]) -> str:
    """Return the name of a field in pydantic's errors, without the functions that validate a choice of a union."""
    return ".".join(str(part) for part in location if not str(part).startswith("function-"))


def wrong_fields(error: ValidationError) -> str:
    """Return the first wrong fields and what is wrong with each, in one line."""
    problems = [(field_name(problem["loc"]), problem["msg"]) for problem in error.errors(include_url=False)]
    return "; ".join(f"{field}: {what}" if field else what for field, what in problems[:4])


class Failure(Frozen):
    """An error that is stored in order to be shown."""

    type: str
    """Name of the class in ``rollout_service.errors``."""
    message: str
