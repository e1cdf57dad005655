"""What a committed weight version consists of: ``manifest.json`` beside its safetensors files. Needs no torch."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import xxhash

from rollout_service.protocol.tensors import QuantWeights, StoredDtype
from rollout_service.protocol.weights import KVScalesFrom
from rollout_service.store.tensor_places import TensorPlaces
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


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a version as the engines load it.

    A version may have 40 000, made or parsed while a new version is waited for: so it is no pydantic model, and is
    checked where a manifest is read.
    """

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
    chunk_digests: bytes = b""
    """xxh3-128 of each ``CHUNK_BYTES`` of the bytes (the last ones may be fewer), one after the other. Empty where
    ``digest`` covers all: in tensors of at most that size, and in versions written before there were chunks. In base64
    in the file."""

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
        return self.chunk_digests or bytes.fromhex(self.digest)


def tensor_digests(data: memoryview) -> tuple[str, bytes]:
    """``digest`` and ``chunk_digests`` of a ``StoredTensor`` with these bytes."""
    data = data.cast("B")
    if data.nbytes <= CHUNK_BYTES:
        return xxhash.xxh3_128_hexdigest(data), b""
    return joined_digests(
        b"".join(in_threads(lambda piece: _chunk_digests(data[piece]), stretches(data.nbytes, STRETCH_BYTES)))
    )


def joined_digests(digests: bytes) -> tuple[str, bytes]:
    """``digest`` and ``chunk_digests`` of a tensor whose chunks have these digests, one after the other."""
    if len(digests) == DIGEST_BYTES:
        return digests.hex(), b""
    return xxhash.xxh3_128_hexdigest(digests), digests


def _chunk_digests(data: memoryview) -> bytes:
    starts = range(0, data.nbytes, CHUNK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES]) for start in starts)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the version was quantized."""

    weights: QuantWeights
    scales: Literal["fp32", "power_of_two"] = "fp32"
    block: tuple[int, int] | None = (128, 128)
    """Rows and columns that share a scale; None: those of an output channel do."""
    not_converted: tuple[str, ...] = ()
    """Linear modules left in BF16."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A version, complete. Immutable once committed."""

    version: Annotated[int, msgspec.Meta(ge=0)]
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

    def replace(self, **changes: Any) -> Self:
        """A copy in which these fields are others."""
        copy = msgspec.structs.replace(self, **changes)
        if "tensors" not in changes:
            copy.__dict__["places"] = self.places
        return copy

    def to_json(self) -> bytes:
        """As ``read_manifest`` reads it."""
        return msgspec.json.encode(self)

    @functools.cached_property
    def places(self) -> TensorPlaces:
        """What the tensors are and where they lie: one object for all versions that agree in it."""
        return TensorPlaces.of(self.tensors)

    @functools.cached_property
    def digest(self) -> str:
        """xxh3-128 over what the engines get: equal for equal content, whatever the version or the file layout."""
        recipe = msgspec.to_builtins(self.recipe)
        if self.recipe.scales == "fp32":
            del recipe["scales"]  # logs written before there was a choice of scales keep their digests
        content = {
            "fingerprint": self.fingerprint,
            "recipe": recipe,
            "kv_scales": "calibrate" if self.awaits_kv_scales else self.kv_scales,
            "delta_of": self.delta_of,
        }
        # of a JSON object with sorted keys, in which "tensors" comes last
        text = json.dumps(content, sort_keys=True)[:-1]
        tensors = self.places.with_digests_as_json([tensor.digest for tensor in self.tensors])
        return xxhash.xxh3_128_hexdigest(f'{text}, "tensors": {tensors}}}'.encode())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.places.nbytes

    def in_order(self) -> tuple[StoredTensor, ...]:
        """The tensors in the order of the files, and in each of their offsets."""
        places = self.places
        return self.tensors if places.is_in_order else tuple(self.tensors[number] for number in places.order)

    def files(self) -> dict[str, tuple[StoredTensor, ...]]:
        """The tensors of each file, in the order of their offsets."""
        tensors = self.in_order()
        return {file: tensors[part] for file, part in self.places.files.items()}


_DECODER = msgspec.json.Decoder(Manifest)


class ManifestDamaged(ValueError):
    """What should be a manifest is none; the message says why."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a version's folder. Raises OSError or ManifestDamaged."""
    return manifest_of_json((folder / MANIFEST_FILE).read_bytes())


def manifest_of_json(text: bytes) -> Manifest:
    """What ``Manifest.to_json`` has written, in this release or an older one. Raises ManifestDamaged."""
    try:
        manifest = _DECODER.decode(text)
        _ = manifest.places  # refuses a name that is there twice
    except ValueError as error:  # of msgspec all are, and of text that is not UTF-8
        raise ManifestDamaged(str(error)) from error
    for tensor in manifest.tensors:
        if digests := tensor.chunk_digests:
            chunks = -(-tensor.nbytes // CHUNK_BYTES)
            if len(digests) != chunks * DIGEST_BYTES or xxhash.xxh3_128_hexdigest(digests) != tensor.digest:
                raise ManifestDamaged(f"chunk_digests of {tensor.name} are not those of its {chunks} chunks")
    return manifest
