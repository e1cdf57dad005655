"""The KV scales of a version that came without any and is measured: a file beside its manifest, written once.

    <root>/<version>/kv_scales.json    JSON, and the xxh3-128 of it on a line of its own
    <root>/kv_scales.json              the same of the version that was settled last

Until it is there the version has been loaded by nobody but the replica that measures it, and served by none.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from rollout_service.errors import LogCorrupt
from rollout_service.protocol.base import Frozen
from rollout_service.store.durable_io import read_sealed, write_sealed

SETTLED_FILE = "kv_scales.json"
_OF_BEFORE = ("how", "drift", "saturated")
"""Fields of files that were written when scales could be kept although new ones had been measured (``max_drift``).
``scales`` and ``largest`` meant what they mean now, whatever ``how`` said, so that these are passed over."""
_FIELDS = TypeAdapter(dict[str, Any])


class KVScaleResult(Frozen):
    """What became of a measurement; immutable once written."""

    version: int
    scales: dict[str, float] | None
    """By ``<attention layer>.{q,k,v}_scale``; None: 1 everywhere."""
    replica_id: str
    """Who measured."""
    tokens: int = Field(ge=0)
    """Positions that were measured."""
    largest: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """Layer → the largest |q|, |k| and |v| that the scales are made from, which ``progressive`` goes on from."""
    error: str | None = None
    """Why the measurement gave no scales, and the version has those of the one before; None: it gave them."""


def write_result(folder: Path, settled: KVScaleResult) -> None:
    """Put it beside the manifest, durably and at once. Raises OSError."""
    write_sealed(folder / SETTLED_FILE, settled.model_dump_json())


def read_result(folder: Path) -> KVScaleResult | None:
    """What is beside the manifest in ``folder``; None if nothing is yet. Raises LogCorrupt for a damaged file."""
    text = read_sealed(folder / SETTLED_FILE)
    if text is None:
        return None
    try:
        fields = _FIELDS.validate_json(text)
        return KVScaleResult.model_validate({name: value for name, value in fields.items() if name not in _OF_BEFORE})
    except ValidationError as error:
        raise LogCorrupt(f"{folder / SETTLED_FILE} does not parse: {error}") from error
