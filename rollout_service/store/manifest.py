"""Manifest of a committed weight version: ``manifest.json`` beside its safetensors files. Needs no torch."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import xxhash

from rollout_service.protocol.tensors import QuantWeights, StoredDtype
from rollout_service.protocol.weights import KVScalesFrom
from rollout_service.runtime.threads import STRETCH_BYTES, in_threads, stretches
from rollout_service.store.layout import TensorPlaces

MANIFEST_FILE = "manifest.json"

CHUNK_BYTES = 1 << 20
"""Bytes of a tensor that one digest covers: a worker that needs a part of a large tensor only checks that part."""
DIGEST_BYTES = 16
"""Size of xxh3-128 in bytes."""


class Chunk(NamedTuple):
    """A range of bytes of a tensor with its own digest."""

    start: int
    """Offset in the tensor, in bytes."""
    nbytes: int
    digest: bytes
    """xxh3-128."""


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a version as the engines load it.

    Not a pydantic model, for speed: a version may have 40 000, which are created or parsed while a new version is
    waited for. Its values are checked when a manifest is read.
    """

    name: str
    """Hugging Face's name. Block scales have the name ``<weight>_scale_inv``, channel scales ``<weight>_scale``."""
    dtype: StoredDtype
    shape: tuple[int, ...]
    file: str
    """Name of the safetensors file in the version's folder."""
    offset: int
    """Offset in that file, from its start, in bytes."""
    nbytes: int
    digest: str
    """xxh3-128 in hex of the bytes; for a tensor with ``chunk_digests``, of these digests in order."""
    chunk_digests: bytes = b""
    """xxh3-128 of each ``CHUNK_BYTES`` of the bytes (the last chunk may be shorter), concatenated. Empty for a
    tensor of at most that size, whose ``digest`` covers all bytes. Base64 in the file."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of all bytes, in order; a single chunk if only ``digest`` covers them.

        Raises ManifestDamaged like ``digests_of_chunks``.
        """
        digests = self.digests_of_chunks()
        if not self.chunk_digests:
            yield Chunk(0, self.nbytes, digests)
            return
        for number, start in enumerate(range(0, self.nbytes, CHUNK_BYTES)):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            yield Chunk(start, min(CHUNK_BYTES, self.nbytes - start), digest)

    def digests_of_chunks(self) -> bytes:
        """Return the digests of ``chunks``, ``DIGEST_BYTES`` each, concatenated. Raises ManifestDamaged."""
        if self.chunk_digests:
            return self.chunk_digests
        try:
            return bytes.fromhex(self.digest)
        except ValueError as error:
            raise ManifestDamaged(f"digest of {self.name} is {self.digest!r}, which is not hexadecimal") from error


def tensor_digests(data: memoryview) -> tuple[str, bytes]:
    """Return ``digest`` and ``chunk_digests`` of a ``StoredTensor`` with these bytes."""
    data = data.cast("B")
    if data.nbytes <= CHUNK_BYTES:
        return xxhash.xxh3_128_hexdigest(data), b""
    return joined_digests(
        b"".join(in_threads(lambda piece: _chunk_digests(data[piece]), stretches(data.nbytes, STRETCH_BYTES)))
    )


def joined_digests(digests: bytes) -> tuple[str, bytes]:
    """Return ``digest`` and ``chunk_digests`` of a tensor from the concatenated digests of its chunks."""
    if len(digests) == DIGEST_BYTES:
        return digests.hex(), b""
    return xxhash.xxh3_128_hexdigest(digests), digests


def _chunk_digests(data: memoryview) -> bytes:
    starts = range(0, data.nbytes, CHUNK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES]) for start in starts)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantization of a version."""

    weights: QuantWeights
    scales: Literal["fp32", "power_of_two"] = "fp32"
    block: tuple[int, int] | None = (128, 128)
    """Rows and columns that share a scale; None: each output channel has one."""
    not_converted: tuple[str, ...] = ()
    """Linear modules left in BF16."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A complete version. Immutable once committed."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    fingerprint: str
    """Fingerprint of its model: engines of another model refuse the version."""
    recipe: Recipe
    tensors: tuple[StoredTensor, ...]
    kv_scales: dict[str, float] | None = None
    """Scales of the FP8 KV cache, by ``<attention layer>.{q,k,v}_scale``; None: 1 everywhere."""
    kv_scales_from: KVScalesFrom = "unit"
    """Origin of the KV scales. ``trainer``: sent with the version. ``reuse``: none were sent, and those of the previous
    version are used. ``unit``: none were sent, and it has none."""
    delta_of: None = None
    """Always None: every version in a log is complete, and the upload's record has the base of a delta. The field
    stays, because it is part of every digest."""
    label: str | None = None
    """The trainer's label; like the next field, not part of ``digest``."""
    rollback_of: int | None = None
    """The version whose files were restored by a rollback."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of these fields."""
        copy = msgspec.structs.replace(self, **changes)
        if "tensors" not in changes:
            copy.__dict__["places"] = self.places
        return copy

    def to_json(self) -> bytes:
        """Return JSON for ``read_manifest``."""
        return msgspec.json.encode(self)

    @functools.cached_property
    def places(self) -> TensorPlaces:
        """Return names, dtypes, shapes and places of the tensors: one object for all versions with equal ones."""
        return TensorPlaces.of(self.tensors)

    @functools.cached_property
    def digest(self) -> str:
        """Return xxh3-128 over the content for the engines: independent of the version's number and its file layout."""
        recipe = msgspec.to_builtins(self.recipe)
        if self.recipe.scales == "fp32":
            del recipe["scales"]  # logs from before scales were configurable keep their digests
        content = {
            "fingerprint": self.fingerprint,
            "recipe": recipe,
            "kv_scales": self.kv_scales,
            "delta_of": self.delta_of,
        }
        # the rest of a JSON object with sorted keys, in which "tensors" comes last
        text = json.dumps(content, sort_keys=True)[:-1]
        tensors = self.places.with_digests_as_json([tensor.digest for tensor in self.tensors])
        return xxhash.xxh3_128_hexdigest(f'{text}, "tensors": {tensors}}}'.encode())

    @property
    def total_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return self.places.nbytes

    def in_order(self) -> tuple[StoredTensor, ...]:
        """Return the tensors in the order of the files and of their offsets."""
        places = self.places
        return self.tensors if places.is_in_order else tuple(self.tensors[number] for number in places.order)

    def files(self) -> dict[str, tuple[StoredTensor, ...]]:
        """Return the tensors of each file, in the order of their offsets."""
        tensors = self.in_order()
        return {file: tensors[part] for file, part in self.places.files.items()}


_DECODER = msgspec.json.Decoder(Manifest)


class ManifestDamaged(ValueError):
    """Raised if a manifest is invalid; the message has the reason."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a version's folder. Raises OSError or ManifestDamaged."""
    return manifest_of_json((folder / MANIFEST_FILE).read_bytes())


def manifest_of_json(text: bytes) -> Manifest:
    """Parse the output of ``Manifest.to_json``. Raises ManifestDamaged."""
    try:
        manifest = _DECODER.decode(text)
        _ = manifest.places  # raises ValueError for a duplicate name
    except ValueError as error:  # all errors of msgspec are ValueErrors, and so are those of invalid UTF-8
        raise ManifestDamaged(str(error)) from error
    for tensor in manifest.tensors:
        digests, chunks = tensor.chunk_digests, -(-tensor.nbytes // CHUNK_BYTES)
        if not digests and chunks <= 1:
            continue
        if len(digests) != chunks * DIGEST_BYTES or xxhash.xxh3_128_hexdigest(digests) != tensor.digest:
            raise ManifestDamaged(f"chunk_digests of {tensor.name} are not those of its {chunks} chunks")
    return manifest
