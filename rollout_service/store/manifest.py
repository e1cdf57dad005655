"""What a committed weight version consists of: ``manifest.json`` beside its safetensors files. Needs no torch."""

import base64
import binascii
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import xxhash
from pydantic import Field, model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.tensors import QuantWeights, StoredDtype
from rollout_service.protocol.weights import KVScalesFrom
from rollout_service.threads import STRETCH_BYTES, in_threads, stretches

MANIFEST_FILE = "manifest.json"


CHUNK_BYTES = 1 << 20
"""Of a tensor, that one digest covers: a worker that needs a part of a large tensor checks no more than that part."""
DIGEST_BYTES = 16
"""Of xxh3-128."""


class Chunk(NamedTuple):
    """Bytes of a tensor with a digest of their own."""

    start: int
    """First byte, counted from the tensor's first."""
    nbytes: int
    digest: bytes
    """xxh3-128."""


class StoredTensor(Frozen):
    """One tensor of a version as the engines load it."""

    name: str
    """Hugging Face's name; scales stand under ``<weight>_scale_inv``, those of channels under ``<weight>_scale``."""
    dtype: StoredDtype
    shape: tuple[int, ...]
    file: str
    """Name of the safetensors file in the version's folder."""
    offset: int
    """First byte in that file, counted from its start."""
    nbytes: int
    digest: str
    """xxh3-128 in hex: of the bytes, or, of a tensor with ``chunk_digests``, of these one after the other."""
    chunk_digests: str = ""
    """xxh3-128 of each ``CHUNK_BYTES`` of the bytes (the last ones may be fewer), one after the other, in base64. Empty
    where ``digest`` covers all: in tensors of at most that size, and in versions written before there were chunks."""

    @model_validator(mode="after")
    def _chunks_are_those_of_the_digest(self) -> "StoredTensor":
        if self.chunk_digests:
            try:
                digests = base64.b64decode(self.chunk_digests, validate=True)
            except binascii.Error as error:
                raise ValueError(f"chunk_digests of {self.name} are not base64: {error}") from error
            chunks = -(-self.nbytes // CHUNK_BYTES)
            if len(digests) != chunks * DIGEST_BYTES or xxhash.xxh3_128_hexdigest(digests) != self.digest:
                raise ValueError(f"chunk_digests of {self.name} are not those of its {chunks} chunks")
        return self

    def chunks(self) -> Iterator[Chunk]:
        """All bytes of the tensor, in order: a single chunk if only ``digest`` covers them."""
        digests = self.digests_of_chunks()
        if not self.chunk_digests:
            yield Chunk(0, self.nbytes, digests)
            return
        for number, start in enumerate(range(0, self.nbytes, CHUNK_BYTES)):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            yield Chunk(start, min(CHUNK_BYTES, self.nbytes - start), digest)

    def digests_of_chunks(self) -> bytes:
        """``DIGEST_BYTES`` of each of ``chunks``, one after the other."""
        return base64.b64decode(self.chunk_digests) if self.chunk_digests else bytes.fromhex(self.digest)


def tensor_digests(data: memoryview) -> tuple[str, str]:
    """``digest`` and ``chunk_digests`` of a ``StoredTensor`` with these bytes."""
    data = data.cast("B")
    if data.nbytes <= CHUNK_BYTES:
        return xxhash.xxh3_128_hexdigest(data), ""
    return joined_digests(
        b"".join(in_threads(lambda piece: _chunk_digests(data[piece]), stretches(data.nbytes, STRETCH_BYTES)))
    )


def joined_digests(digests: bytes) -> tuple[str, str]:
    """``digest`` and ``chunk_digests`` of a tensor whose chunks have these digests, one after the other."""
    if len(digests) == DIGEST_BYTES:
        return digests.hex(), ""
    return xxhash.xxh3_128_hexdigest(digests), base64.b64encode(digests).decode()


def _chunk_digests(data: memoryview) -> bytes:
    starts = range(0, data.nbytes, CHUNK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES]) for start in starts)


class Recipe(Frozen):
    """How the version was quantized."""

    weights: QuantWeights
    scales: Literal["fp32", "power_of_two"] = "fp32"
    block: tuple[int, int] | None = (128, 128)
    """Rows and columns that share a scale; None: those of an output channel do."""
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
    """Where they come from, see kv_scales/coordinator.py. ``trainer``: with the version. ``calibrate``: measured by the
    first replica that loads it, and kept beside the manifest. ``reuse``: it came without, and these are those of the
    version before. ``unit``: it came without, and has none."""
    delta_of: None = None
    """Every version in a log is complete by itself: of one that came as a delta, the upload's record tells what it was
    applied to. The field stays, because it is part of every digest."""
    label: str | None = None
    """What the trainer calls it; not part of ``digest``, nor is the next."""
    rollback_of: int | None = None
    """The version whose files these are again."""

    @property
    def awaits_kv_scales(self) -> bool:
        """Whether its scales are not in it, but beside it once they are measured."""
        return self.kv_scales is None and self.kv_scales_from == "calibrate"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """See pydantic."""
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("digest", None)  # pydantic copies what was computed, too
        return copy

    @functools.cached_property
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
