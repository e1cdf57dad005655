"""What a committed weight version consists of: ``manifest.json`` beside its safetensors files. Needs no torch."""

import json
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import Field

from rollout_service.types import Frozen, KVScalesFrom

MANIFEST_FILE = "manifest.json"

StoredDtype = Literal["bfloat16", "float32", "float8_e4m3fn"]
STORED_DTYPE_BYTES: dict[StoredDtype, int] = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}


class StoredTensor(Frozen):
    """One tensor of a version as the engines load it."""

    name: str
    """Hugging Face's name; block scales stand under ``<weight>_scale_inv``."""
    dtype: StoredDtype
    shape: tuple[int, ...]
    file: str
    """Name of the safetensors file in the version's folder."""
    offset: int
    """First byte in that file, counted from its start."""
    nbytes: int
    digest: str
    """xxh3-128 of the bytes, in hex."""


class Recipe(Frozen):
    """How the version was quantized."""

    weights: Literal["fp8_block", "none"]
    scales: Literal["fp32", "power_of_two"] = "fp32"
    block: tuple[int, int] = (128, 128)
    not_converted: tuple[str, ...] = ()
    """Linear modules left in BF16."""


class Manifest(Frozen):
    """A version, complete. Immutable once committed."""

    version: int = Field(ge=0)
    fingerprint: str
    """Of the model it belongs to: engines of another model refuse it."""
    recipe: Recipe
    tensors: tuple[StoredTensor, ...]
    kv_scales: dict[str, float] | None = None
    """Scales of the FP8 KV cache, by ``<attention layer>.{q,k,v}_scale``; None: 1 everywhere, or they come later."""
    kv_scales_from: KVScalesFrom = "unit"
    """Where they come from. ``trainer``: with the version. ``calibrate``: measured by the first replica that loads it,
    and kept beside the manifest (weights/kv_settled.py). ``reuse``: it came without, and these are those of the version
    before. ``unit``: it came without, and has none."""
    delta_of: int | None = None
    """The version this one is a delta of; None: complete by itself."""

    @property
    def awaits_kv_scales(self) -> bool:
        """Whether its scales are not in it, but beside it once they are measured."""
        return self.kv_scales is None and self.kv_scales_from == "calibrate"

    @property
    def digest(self) -> str:
        """xxh3-128 over what the engines get: equal for equal content, whatever the version or the file layout."""
        content = {
            "fingerprint": self.fingerprint,
            # logs written before there was a choice of scales keep their digests
            "recipe": self.recipe.model_dump(mode="json", exclude={"scales"} if self.recipe.scales == "fp32" else None),
            "kv_scales": "calibrate" if self.awaits_kv_scales else self.kv_scales,
            "delta_of": self.delta_of,
            "tensors": sorted((t.name, t.dtype, list(t.shape), t.digest) for t in self.tensors),
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def files(self) -> dict[str, list[StoredTensor]]:
        """The tensors of each file, in the order of their offsets."""
        by_file: dict[str, list[StoredTensor]] = {}
        for tensor in sorted(self.tensors, key=lambda t: (t.file, t.offset)):
            by_file.setdefault(tensor.file, []).append(tensor)
        return by_file


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a version's folder. Raises OSError or pydantic.ValidationError."""
    return Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
