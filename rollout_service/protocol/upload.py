"""What a trainer and the ingest say to each other while a version is uploaded. Needs neither torch nor ray.

A trainer sends its weights as it has them, under Hugging Face's names (routed experts one by one or stacked), and the
ingest quantizes. Or it sends a weight of ``TrainerRecipe.quantized`` as what it becomes: ``float8_e4m3fn`` codes under
the weight's own name on disk, and their ``float32`` block scales [⌈N/128⌉, ⌈K/128⌉] under ``<name>_scale_inv``; or as
``float8_e4m3fn`` or ``int8`` codes and channel scales [N, 1] under ``<name>_scale``, as ``TrainerRecipe.weights`` says.

Or it sends a delta: what has changed since a version that is in the log, ``Announcement.delta``. That version is named
by its number and by a digest of the tensors in it. Each part says which tensors it is about, what has changed in them,
and what digest each must have afterwards (``delta_parts``): so a delta is announced before the trainer has compared
anything, and its parts are sent as they are made. The ingest takes the base from the log, applies the changes (see
``delta``), and stores a whole version: byte for byte, and with the same digest, the one that the tensors themselves
would have made. Where the log does not hold that base, it answers DeltaBaseGone, and the trainer sends all.

The tensors' raw bytes (little-endian, contiguous, in the order of ``tensors``, nothing between them) are one stream,
cut into parts of ``part_bytes``; the last part is what is left. Part ``i`` therefore holds the bytes ``[i * part_bytes,
(i + 1) * part_bytes)`` of the stream, and either side can work that out from the announcement. So it can which tensors
part ``i`` of a delta is about, and how many parts there are; how many bytes one has its Content-Length says.

    GET  /v1/weights/recipe                              -> TrainerRecipe
    POST /v1/weights                        Announcement -> UploadPlan
    PUT  /v1/weights/{version}/parts/{i}    raw bytes, header X-Part-Digest: xxh3-128 in hex -> PartReceipt
    GET  /v1/weights/{version}/listener?nonce=…                                              -> ListenerProof
    POST /v1/weights/{version}/shared       SharedTensors -> 204
    POST /v1/weights/{version}/commit       CommitUpload -> WeightStatus
    POST /v1/weights/rollback               RollBack     -> WeightStatus

Parts, and what says where tensors lie in shared memory, go to the service's own address, with the bearer token, or to
``UploadPlan.upload_url`` with the header X-Upload-Key and no token, once that address has proved itself (by the route
that ends in ``listener``, which only it has).

A trainer on the ingest's own machine may announce memory that both share, the host's or a GPU's, instead of a table
that parts follow, and then says which tensors lie in it, batch by batch. NotShared: the ingest cannot reach it.

A trainer has the same tensors at every step, and a table of 19 000 takes both ends half a second of Python to write and
to read. So the ingest keeps the last few tables that it was sent, and gives each a name, ``UploadPlan.table``, by which
the next version is announced: ``Announcement.table``. TableUnknown: it has not kept that one, as after a restart; the
trainer then sends the table.

All of them may be repeated. ``UploadPlan.digests`` lists the parts that the ingest has, of a committed version too, so
that a client sends what is missing and can tell whether the rest is what it would send. Who sends one part with other
bytes gets 409 with both digests. When two clients upload the same version at once, the one that began first (by its
``X-Uploader``) has its way until the other has committed, and ``CommitUpload.upload_digest`` keeps either from
committing a mixture.

A version has a number, which only grows, and may have a label, the trainer's own name of it. A trainer whose count goes
back, as when it resumes from an older checkpoint, announces the version ``next``: the ingest gives it the first number
above all that are committed or staged, and ``UploadPlan.version`` says which. Announced again by the same ``uploader``
it has the same number. Under the same label another uploader, such as a trainer that was restarted, takes the place of
one that has not committed: it goes on with the parts that are there, and may replace them. What nobody goes on with is
dropped by the next commit, or after ``weights.staged_ttl_s``.
"""

import functools
import hashlib
import hmac
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

import xxhash
from pydantic import Field, model_validator

from rollout_service.protocol.base import NEXT, Frozen, KnownVersion, NewVersion, VersionLabel, WeightVersion
from rollout_service.protocol.delta_parts import tensors_of_parts
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.ignored import NOTHING_IGNORED, IgnoredTensors
from rollout_service.protocol.tensors import QuantWeights
from rollout_service.ring import ALIGNMENT_BYTES, aligned

PART_DIGEST_HEADER = "X-Part-Digest"
UPLOADER_HEADER = "X-Uploader"
"""Names one push of one client, as ``BeginUpload.uploader`` does."""
UPLOAD_KEY_HEADER = "X-Upload-Key"
"""``UploadPlan.upload_key``, for the listener at ``UploadPlan.upload_url`` alone."""

LARGEST_PART_BYTES = 256 << 20
"""More than this no service asks for, and no part of a delta has."""

DTYPE_BYTES: dict["SourceDtype", int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Dtypes a trainer may send, and their size; those of one byte are codes, which come with their scales."""

SourceDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]


class TrainerRecipe(Frozen):
    """Reply to ``GET /v1/weights/recipe``: what the ingest makes of each tensor, for a trainer that does it itself."""

    weights: QuantWeights
    scales: Literal["fp32", "power_of_two"] = "fp32"
    quantized: tuple[str, ...] = ()
    """Weights that become codes and scales, by their names on disk; all other tensors are BF16,"""
    keep_float32: tuple[str, ...] = ()
    """but for these."""
    experts: ExpertNaming | None = None
    """Names of routed experts, to take stacked ones apart; None: the model has none."""
    ignored: IgnoredTensors = NOTHING_IGNORED
    """Tensors that may come, and of which nothing is made."""


class UploadTensor(Frozen):
    """One tensor of the stream, under Hugging Face's name."""

    name: str = Field(min_length=1)
    dtype: SourceDtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the stream."""
        return _nbytes(self.shape, self.dtype)


@functools.lru_cache(4096)  # asked for many times in a push by both ends, and of a model's tensors few shapes differ
def _nbytes(shape: tuple[int, ...], dtype: SourceDtype) -> int:
    return math.prod(shape) * DTYPE_BYTES[dtype]


class PathSource(Frozen):
    """A Hugging Face folder of safetensors that the ingest can read itself."""

    transport: ClassVar[str] = "path"
    path: Path


class ObjectSource(Frozen):
    """Objects in Ray's store, see ``ingest/sources/ray_objects.py``. Only taken through the ingest's Python handle."""

    transport: ClassVar[str] = "objects"
    digest: str
    """xxh3-128 over what they hold."""


class BroadcastSource(Frozen):
    """What a trainer broadcasts, see ``ingest/weight_transfer.py``. Only begun by ``POST /start_weight_update``."""

    transport: ClassVar[str] = "broadcast"
    transfer: str
    """A name that no other update has: what was broadcast cannot be read again."""


class SharedMemorySource(Frozen):
    """Memory of a trainer on the ingest's own machine, which the trainer fills again and again: ``SharedTensors``."""

    transport: ClassVar[str] = "shared_memory"
    transfer: str = Field(pattern="^[0-9a-f]{32}$")
    """A name that no other push has: what was in the memory cannot be read again."""
    machine: str = Field(max_length=64)
    """``shared_memory.machine()`` of the trainer."""
    process: int = Field(ge=1)
    descriptor: int = Field(ge=0)
    """Of the trainer's process."""
    memory: str = Field(pattern="^[0-9a-f]{32}$")
    """Its name."""
    tensors: tuple[UploadTensor, ...] = ()
    """All that will come; empty where ``Announcement.table`` names them."""


class CudaIpcSource(SharedMemorySource):
    """Memory on the trainer's GPU, filled again and again in the same way: offsets of ``SharedTensors`` count in it.

    The shared memory has no tensors then. Who can open it is a process of the same machine and user, and it is there
    for as long as the trainer has the GPU's memory.
    """

    transport: ClassVar[str] = "cuda_ipc"
    gpu: str = Field(max_length=64)
    """UUID of the trainer's GPU, for messages: who opens the handle need not see that GPU."""
    handle: str = Field(pattern="^[0-9a-f]{128}$")
    """``cudaIpcMemHandle_t`` of one allocation, in hex."""
    handle_bytes: int = Field(ge=1)
    """Of that allocation, that may be used."""


SHARED_ALIGNMENT = ALIGNMENT_BYTES
"""Of the first byte of a tensor in shared memory."""


class SharedTensors(Frozen):
    """Body of ``POST /v1/weights/{version}/shared``: tensors that may be read now. Answered when they have been.

    Of the tensors that were announced, those with the numbers ``first`` to ``first + count - 1``. They lie in the
    memory, raw, little-endian and contiguous, where ``placed`` puts them.
    """

    transfer: str
    batch: int = Field(ge=0)
    """Counts the bodies of one transfer: the same again is answered as it was."""
    first: int = Field(ge=0)
    count: int = Field(ge=1)
    offset: int = Field(ge=0)
    """Of the first tensor's first byte, a multiple of ``SHARED_ALIGNMENT``."""


def placed(tensors: Iterable[UploadTensor], offset: int) -> Iterator[tuple[UploadTensor, int]]:
    """Where tensors lie in shared memory from ``offset`` on, by their first bytes: each at the first multiple of
    ``SHARED_ALIGNMENT`` after the one before, of which one without elements takes up as much."""
    for tensor in tensors:
        yield tensor, offset
        offset += aligned(max(tensor.nbytes, 1))


class Delta(Frozen):
    """The parts hold changes, not tensors: see ``delta_parts.py``."""

    base: WeightVersion
    """The version that is changed."""
    base_digest: str
    """``base_digest`` of the announced tensors in that version."""


AnyAnnouncement = TypeVar("AnyAnnouncement", bound="Announcement")


class Announcement(Frozen):
    """Body of ``POST /v1/weights``: either a tensor table to be followed by parts, or a source."""

    version: NewVersion
    """``next``: the ingest gives it a number."""
    tensors: tuple[UploadTensor, ...] = ()
    table: str | None = Field(default=None, max_length=64)
    """``UploadPlan.table`` of an earlier announcement, in place of its tensors, which stood here or in ``source``."""
    source: PathSource | ObjectSource | BroadcastSource | CudaIpcSource | SharedMemorySource | None = None
    kv_scales: dict[str, float] | None = None
    """Scales of the FP8 KV cache that go with these weights, as ``KVScales.named()`` gives them: all of q, k and v of
    every attention layer. None: the service's ``kv_cache.scales_policy`` says which."""
    uploader: str = Field(default="", max_length=256)
    """A name that no other push has; empty: none."""
    label: VersionLabel | None = None
    delta: Delta | None = None
    """None: the parts hold the tensors themselves."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[type[Self], str]]:
        """As JSON: a table of 37 000 tensors is pickled in a tenth of the time that as many objects take, and read in
        half of it."""
        return _from_json, (type(self), self.model_dump_json(exclude_defaults=True))

    @model_validator(mode="after")
    def _tensors_or_source(self) -> Self:
        has_table = bool(self.tensors) or (self.table is not None and self.source is None)
        if has_table == (self.source is not None):
            raise ValueError("give either tensors (then upload their parts) or source, not both and not neither")
        shared = self.source if isinstance(self.source, SharedMemorySource) else None
        in_full = self.tensors if shared is None else shared.tensors
        if self.table is not None and self.source is not None and shared is None:
            raise ValueError("table names tensors that come in parts or through shared memory: not those of a source")
        if self.table is not None and in_full:
            raise ValueError("give the tensors or the name of their table, not both")
        if shared is not None and self.table is None and not in_full:
            raise ValueError("source.tensors is empty: say which tensors will come, or name their table")
        if self.version == NEXT and not self.uploader and self.label is None:
            raise ValueError("version next needs an uploader or a label, by which the same push is known again")
        return self

    @model_validator(mode="after")
    def _delta_of_an_older_version(self) -> Self:
        if self.delta is None:
            return self
        if self.source is not None:
            raise ValueError("the changes of a delta come in parts: give tensors, and no source")
        if self.version != NEXT and self.delta.base >= self.version:
            raise ValueError(f"version {self.version} cannot be a delta of version {self.delta.base}: of an older one")
        return self

    @property
    def announced_tensors(self) -> tuple[UploadTensor, ...]:
        """All that come: in parts, as a delta makes them, or through shared memory. Empty for another source."""
        return self.source.tensors if isinstance(self.source, SharedMemorySource) else self.tensors

    def with_table(self, tensors: tuple[UploadTensor, ...]) -> Self:
        """The same with the tensors that ``table`` names."""
        return self._with({"table": None}, tensors)

    def by_table(self, table: str) -> Self:
        """The same with the name of its table in place of the tensors."""
        return self._with({"table": table}, ())

    def _with(self, changes: dict[str, object], tensors: tuple[UploadTensor, ...]) -> Self:
        if isinstance(self.source, SharedMemorySource):
            changes["source"] = self.source.model_copy(update={"tensors": tensors})
        else:
            changes["tensors"] = tensors
        return self.model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)

    @functools.cached_property
    def delta_parts(self) -> tuple[range, ...]:
        """Of a delta, the tensors that each part is about, by their places among all."""
        return tensors_of_parts([tensor.nbytes for tensor in self.tensors])

    def num_parts(self, part_bytes: int) -> int:
        """Parts of the whole upload. ``part_bytes``: that each has but the last, if it is no delta."""
        return num_parts(self.nbytes, part_bytes) if self.delta is None else len(self.delta_parts)

    @property
    def transport(self) -> str:
        """How the tensors come, for metrics."""
        if self.source is not None:
            return self.source.transport
        return "parts" if self.delta is None else "delta"

    @functools.cached_property
    def nbytes(self) -> int:
        """Of all tensors that come in parts, or of which changes do. Asked for at each part, and a version of 37 000
        tensors may have 500."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def numbered(self, version: int) -> "BeginUpload":
        """The same, as that version."""
        fields = {name: getattr(self, name) for name in Announcement.model_fields}
        return BeginUpload.model_validate({**fields, "version": version})


def _from_json(kind: type[AnyAnnouncement], text: str) -> AnyAnnouncement:
    return kind.model_validate_json(text)


class BeginUpload(Announcement):
    """An announcement whose version has its number."""

    version: WeightVersion

    def describes_what(self, other: "BeginUpload") -> bool:
        """Whether the same stream or source is announced, with the same KV scales, whoever announces it."""
        mine = (self.version, self.tensors, self.source, self.kv_scales, self.delta)
        return mine == (other.version, other.tensors, other.source, other.kv_scales, other.delta)


class UploadPlan(Frozen):
    """Reply to ``POST /v1/weights``: what the ingest still wants, and where to send it."""

    version: int
    state: Literal["staged", "committed"]
    part_bytes: int
    """Of each part but the last, if it is no delta."""
    num_parts: int
    missing_parts: tuple[int, ...]
    digests: dict[int, str] = Field(default_factory=dict)
    """xxh3-128 in hex of each part that the ingest has."""
    table: str | None = None
    """A name of the announced tensors, for the next announcement of the same; None: the ingest has not kept them."""
    replaces: bool = False
    """Whether the caller may send other parts than those: it has taken the place of an earlier push of its label."""
    upload_url: str | None = None
    """Address that takes parts and batches of shared memory directly, with fewer hops than the service's own; None:
    there is none that the caller is known to reach."""
    upload_key: str | None = None
    """By which that address and the caller know each other; valid for the parts of this version."""
    upload_certificate: str | None = None
    """The certificate that it shows, in PEM, if ``upload_url`` is https: whoever shows another one is somebody else.
    It need not be signed by an authority that the caller knows, nor be for that address."""


class ListenerProof(Frozen):
    """Reply to ``GET .../listener``."""

    proof: str
    """``listener_proof`` of the upload's key and the caller's nonce."""


class PartReceipt(Frozen):
    """Reply to ``PUT .../parts/{i}``: the part is on disk and its digest was right."""

    version: int
    part: int
    nbytes: int
    digest: str


WaitFor = Literal["none", "all", "durable"]
"""What a commit, or a rollback, answers after: see ``HowToLoad.wait``."""


class HowToLoad(Frozen):
    """How replicas come to serve a version, and what its caller waits for."""

    mode: PauseMode = "keep"
    """What happens to running rollouts: ``keep`` recomputes their KV cache and goes on with the new weights, ``wait``
    lets them finish first, ``abort`` ends them with ``finish_reason="abort"``."""
    wait: WaitFor = "none"
    """``all``: answer when every live replica serves this version. ``durable``: when it outlives its machine,
    ``WeightStatus.durable``, whoever serves it by then; a version that somebody waits for is not overtaken on its way
    to the disk. 422 where the log is in memory alone."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long ``wait`` waits before 504."""


class RollBack(HowToLoad):
    """Body of ``POST /v1/weights/rollback``."""

    to: KnownVersion
    """A version that is still on disk."""


class CommitUpload(HowToLoad):
    """Body of ``POST /v1/weights/{version}/commit``."""

    upload_digest: str | None = None
    """``upload_digest`` of the parts that the caller means, ``with_kv_scales``; 409 if the ingest has others. None:
    whatever is there."""


def listener_proof(key: str, nonce: str) -> str:
    """HMAC-SHA256 in hex: shows that a listener knows an upload's key, and does not tell the key."""
    return hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def upload_digest(part_digests: Iterable[str]) -> str:
    """xxh3-128 over the digests of all parts, in order."""
    return xxhash.xxh3_128_hexdigest("".join(part_digests).encode())


def base_digest(tensor_digests: Iterable[str]) -> str:
    """xxh3-128 over the digests of some tensors of a version, as ``StoredTensor.digest`` has them, in order."""
    return xxhash.xxh3_128_hexdigest("".join(tensor_digests).encode())


def with_kv_scales(digest: str, kv_scales: Mapping[str, float] | None) -> str:
    """The digest of some weights and the KV scales that go with them: without scales, that of the weights."""
    if kv_scales is None:
        return digest
    return xxhash.xxh3_128_hexdigest((digest + json.dumps(kv_scales, sort_keys=True)).encode())


def num_parts(nbytes: int, part_bytes: int) -> int:
    """Parts that a stream of ``nbytes`` is cut into."""
    return math.ceil(nbytes / part_bytes)


def part_size(part: int, nbytes: int, part_bytes: int) -> int:
    """Size of one part; only the last may be shorter than ``part_bytes``."""
    return min(part_bytes, nbytes - part * part_bytes)


def tensor_offsets(tensors: tuple[UploadTensor, ...]) -> Iterator[tuple[UploadTensor, int]]:
    """Each tensor with the offset of its first byte in the stream."""
    offset = 0
    for tensor in tensors:
        yield tensor, offset
        offset += tensor.nbytes


class Listener(Frozen):
    """What a caller needs to send parts of one version to the listener."""

    url: str
    key: str
    certificate: str | None = None
    """What it shows, in PEM, if ``url`` is https."""
