"""Undocumented names of pydantic that this package uses, from pydantic 2.13 on."""

import functools
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator

_COLLECTIONS = ("list", "tuple", "set", "frozenset")
"""Types of pydantic's core schemas that have ``fail_fast``."""
_NO_SCHEMAS = ("default", "expected", "metadata")
"""Keys of core schemas whose values are not schemas."""


@functools.cache
def fail_fast_validator(model: type[BaseModel]) -> SchemaValidator:
    """Return a validator of the model that stops at the first invalid entry of each list.

    The model's own makes an error of each entry for each member of a union: hundreds for an item of vLLM's Responses
    API.
    """
    # without the argument, which pydantic's own rebuild of a model sets, the validators of nested models are reused
    return SchemaValidator(_failing_fast(model.__pydantic_core_schema__), _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """Return a copy of pydantic's core schema, or of a part of it, with ``fail_fast`` in each collection."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in _NO_SCHEMAS else _failing_fast(value) for key, value in schema.items()}
    # a model's fields are a dict too, and one of them may be named type
    return copy | {"fail_fast": True} if copy.get("type") in _COLLECTIONS else copy
