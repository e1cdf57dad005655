"""Undocumented names of pydantic that this package uses, from pydantic 2.13 on."""

import functools
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, core_schema

from rollout_service.protocol.base import FEW

_COLLECTIONS = ("dict", "list", "tuple", "set", "frozenset")
"""Types of pydantic's core schemas that have ``fail_fast``."""
_NO_SCHEMAS = ("default", "expected", "metadata")
"""Keys of core schemas whose values are not schemas."""


@functools.cache
def fail_fast_validator(of: Any) -> SchemaValidator:
    """Return a validator of a type that stops at the first invalid entry of each list or dict.

    More than ``FEW`` unknown fields of a model that forbids them are one error. pydantic's own validators make an error
    of each entry or field, and a body has room for a million. They do so for each member of a union: hundreds for an
    item of vLLM's Responses API.
    """
    # without the argument, which pydantic's own rebuild of a model sets, the validators of nested models are reused
    return SchemaValidator(_failing_fast(TypeAdapter(of).core_schema), _use_prebuilt=False)


def _failing_fast(schema: Any, forbids: bool = False) -> Any:
    """Return a copy of pydantic's core schema, or of a part of it, that fails fast.

    ``forbids``: the part belongs to a model that forbids unknown fields.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(part, forbids) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    # a model's fields are a dict too, and may have these names
    skipped = _NO_SCHEMAS if isinstance(kind, str) else ()
    if kind == "model":
        forbids = schema.get("config", {}).get("extra_fields_behavior") == "forbid"
    copy: Any = {k: part if k in skipped else _failing_fast(part, forbids) for k, part in schema.items()}
    if kind in _COLLECTIONS:
        copy["fail_fast"] = True
    elif kind == "model-fields" and forbids:
        known = {field.get("validation_alias", name) for name, field in schema["fields"].items()}
        # inside the model's validators of mode before, which may remove names
        return core_schema.no_info_before_validator_function(functools.partial(_with_few_unknown, known), copy)
    return copy


def _with_few_unknown(known: set[str], data: object) -> object:
    """Return ``data``. Raises ValueError if more than ``FEW`` of its names are unknown."""
    if isinstance(data, dict) and len(data) > FEW:
        unknown = [name for name in data if name not in known]
        if len(unknown) > FEW:
            raise ValueError(
                f"{len(unknown)} names are no fields here, or not implemented: leave out "
                f"{', '.join(name[:64] for name in unknown[:FEW])} and the rest"
            )
    return data
