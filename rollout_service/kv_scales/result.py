"""The KV scales of a version that came without any and is measured: a file beside its manifest, written once.

    <root>/<version>/kv_scales.json    JSON, and the xxh3-128 of it on a line of its own
    <root>/kv_scales.json              the same of the version that was settled last

Until it is there the version has been loaded by nobody but the replica that measures it, and served by none.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from rollout_service.errors import LogCorrupt
from rollout_service.protocol.base import Frozen
from rollout_service.store.durable_io import read_sealed, write_sealed

SETTLED_FILE = "kv_scales.json"


class KVScaleResult(Frozen):
    """What became of a measurement; immutable once written."""

    version: int
    scales: dict[str, float] | None
    """By ``<attention layer>.{q,k,v}_scale``; None: 1 everywhere."""
    how: Literal["measured", "kept", "failed"]
    """``kept``: new ones would have been too much like those before. ``failed``: as before, see ``error``."""
    replica_id: str
    """Who measured."""
    tokens: int = Field(ge=0)
    """Positions that were measured."""
    drift: float | None = None
    """The largest factor, less 1, between a scale that was measured and the one before; None: there was none before."""
    saturated: float | None = None
    """The largest share of a layer's k or v beyond the largest code with the scales before."""
    largest: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """Layer → |q|, |k|, |v| that the scales are made from, for ``progressive``."""
    error: str | None = None
    """Why there are no new ones."""


def write_result(folder: Path, settled: KVScaleResult) -> None:
    """Put it beside the manifest, durably and at once. Raises OSError."""
    write_sealed(folder / SETTLED_FILE, settled.model_dump_json())


def read_result(folder: Path) -> KVScaleResult | None:
    """What is beside the manifest in ``folder``; None if nothing is yet. Raises LogCorrupt for a damaged file."""
    text = read_sealed(folder / SETTLED_FILE)
    try:
        return None if text is None else KVScaleResult.model_validate_json(text)
    except ValidationError as error:
        raise LogCorrupt(f"{folder / SETTLED_FILE} does not parse: {error}") from error
