"""Messages between a trainer and the ingest during the upload of a version. Needs neither torch nor ray.

**Tensors.** A trainer sends its weights in its own dtypes, under Hugging Face's names (routed experts separate or
stacked), and the ingest quantizes them. Alternatively, the trainer quantizes the weights listed in
``TrainerRecipe.quantized`` in the format ``TrainerRecipe.weights``. With block scales, it sends ``float8_e4m3fn`` codes
under the weight's name on disk, and ``float32`` scales [⌈N/128⌉, ⌈K/128⌉] under ``<name>_scale_inv``. With channel
scales, it sends ``float8_e4m3fn`` or ``int8`` codes, and scales [N, 1] under ``<name>_scale``.

**Deltas.** A trainer may send only the changes since a version in the log, ``Announcement.delta``. The base version is
identified by its number and by a digest of its tensors. Each part states its tensors, their changes and their digests
after the change (``delta_parts``). A delta can therefore be announced before the trainer has compared anything, and its
parts are sent as they are made. The ingest applies the changes (see ``delta``) to the base and stores a whole version,
with the same bytes and digest as a full upload. If the log does not hold the base, the ingest answers DeltaBaseGone,
and the trainer sends all tensors.

**Parts.** The raw bytes of the tensors (little-endian, contiguous, in the order of ``tensors``, without gaps) form one
stream. It is cut into parts of ``part_bytes``; the last part may be shorter. Part ``i`` holds the bytes ``[i *
part_bytes, (i + 1) * part_bytes)``, which both ends compute from the announcement. Both also compute the number of a
delta's parts and the tensors of each; its Content-Length gives the size of such a part.

    GET  /v1/weights/recipe                              -> TrainerRecipe
    POST /v1/weights                        Announcement -> UploadPlan
    PUT  /v1/weights/{version}/parts/{i}    raw bytes, header X-Part-Digest: xxh3-128 in hex -> PartReceipt
    GET  /v1/weights/{version}/listener?nonce=…                                              -> ListenerProof
    POST /v1/weights/{version}/shared       SharedTensors -> 204
    POST /v1/weights/{version}/commit       CommitUpload -> WeightStatus
    POST /v1/weights/rollback               RollBack     -> WeightStatus

**Addresses.** Parts and SharedTensors go to the service's own address with the bearer token. They may also go to
``UploadPlan.upload_url`` with the header X-Upload-Key and no token, after that address has proved itself by the
``listener`` route, which only it has.

**Shared memory.** A trainer on the ingest's machine may announce shared memory, of the host or of a GPU, instead of a
table with parts. It then reports the tensors in that memory batch by batch. The ingest answers NotShared if it cannot
open the memory.

**Retries.** All requests may be repeated. ``UploadPlan.digests`` lists the parts that the ingest has, also for a
committed version. A client can therefore send only parts that are missing or have other bytes. Until the commit, the
last announcement of a version wins: it continues an upload of the same tensors, and replaces any other. Parts of
earlier pushes, by their ``X-Uploader``, then get 409, as does any difference from a committed version.
``CommitUpload.upload_digest`` keeps a push from committing the parts or the path of another.

**Versions.** A version has a number, which only grows, and may have a label, the trainer's own name for it. A trainer
whose step count decreases, as after resuming from an older checkpoint, announces the version ``next``. The ingest then
assigns the first number above all committed and staged ones and returns it as ``UploadPlan.version``. If the same
``uploader`` announces again, or a restarted trainer the same label, the number stays the same. An abandoned upload is
dropped by the next commit, or after ``weights.staged_ttl_s``.
"""

import functools
import hashlib
import hmac
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeVar

import xxhash
from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from rollout_service.protocol.base import (
    NEXT,
    Frozen,
    KnownVersion,
    NewVersion,
    VersionLabel,
    WeightVersion,
    refuse_bool,
)
from rollout_service.protocol.delta_parts import most_bytes, tensors_of_parts
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.ignored import NOTHING_IGNORED, IgnoredTensors
from rollout_service.protocol.ring import ALIGNMENT_BYTES, aligned
from rollout_service.protocol.tensors import AnnouncedShape, QuantWeights

PART_DIGEST_HEADER = "X-Part-Digest"
UPLOADER_HEADER = "X-Uploader"
"""Identifies one push of one client, like ``BeginUpload.uploader``."""
UPLOAD_KEY_HEADER = "X-Upload-Key"
"""``UploadPlan.upload_key``, only for the listener at ``UploadPlan.upload_url``."""

LARGEST_PART_BYTES = 256 << 20
"""Maximum size of a part in bytes, for all services and for deltas."""
MAX_PATH_CHARACTERS = 4096
"""Maximum length of a path or URL in characters."""
URL = "^[a-z][a-z0-9+.-]*://"
"""Pattern of the beginning of a store's URL."""

DTYPE_BYTES: dict["SourceDtype", int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Dtypes that a trainer may send, with their sizes in bytes. One-byte dtypes are codes, which come with scales."""

SourceDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]


Kernels = Literal["cpu", "cuda_eager", "cuda_compiled"]
"""Kinds of an engine's kernels between its matrix products, which round at different places."""


class TrainerRecipe(Frozen):
    """Reply to ``GET /v1/weights/recipe``: how the ingest converts each tensor, for a trainer that does it itself, and
    how engines compute, for a trainer that imitates them."""

    weights: QuantWeights
    scales: Literal["fp32", "power_of_two"] = "fp32"
    quantized: tuple[str, ...] = ()
    """Weights that become codes and scales, by their names on disk. All other tensors are BF16,"""
    keep_float32: tuple[str, ...] = ()
    """except these."""
    experts: ExpertNaming | None = None
    """Names of routed experts, to split stacked ones; None: the model has none."""
    ignored: IgnoredTensors = NOTHING_IGNORED
    """Tensors that may be sent and are not stored."""
    kernels: Kernels | None = None
    """Kernels of the engines. None: not known, as with a ``compilation_config`` in ``engine.extra``."""
    adapters: bool = False
    """True if the engines may compute adapters: they then quantize in kernels of their own."""
    kv_cache: Literal["fp8_e4m3", "bfloat16"] | None = None
    """Format of the engines' keys and values. None: ``kv_cache.dtype`` is ``auto``, and no replica has chosen yet."""


class UploadTensor(Frozen):
    """One tensor of the stream, under Hugging Face's name."""

    name: str = Field(min_length=1, max_length=1024)
    dtype: SourceDtype
    shape: AnnouncedShape

    @property
    def nbytes(self) -> int:
        """Return the size in the stream, in bytes."""
        return _nbytes(self.shape, self.dtype)


@functools.lru_cache(4096)  # both ends call it often in a push, and a model's tensors have few different shapes
def _nbytes(shape: tuple[int, ...], dtype: SourceDtype) -> int:
    return math.prod(shape) * DTYPE_BYTES[dtype]


def _require_short(path: Path) -> Path:
    # following a path of a million names would take the ingest minutes
    if len(str(path)) > MAX_PATH_CHARACTERS:
        raise ValueError(f"Path should have at most {MAX_PATH_CHARACTERS} characters")
    return path


class PathSource(Frozen):
    """A Hugging Face folder of safetensors that the ingest can read itself."""

    transport: ClassVar[str] = "path"
    path: Annotated[Path, AfterValidator(_require_short)]


class BroadcastSource(Frozen):
    """Tensors that a trainer broadcasts, see ``ingest/weight_transfer.py``. Only ``POST /start_weight_update`` begins
    one."""

    transport: ClassVar[str] = "broadcast"
    transfer: str
    """A name that no other update has: broadcast tensors cannot be read again."""


class SharedMemorySource(Frozen):
    """Memory of a trainer on the ingest's machine, which the trainer refills for each batch: see ``SharedTensors``."""

    transport: ClassVar[str] = "shared_memory"
    transfer: str = Field(pattern="^[0-9a-f]{32}$")
    """A name that no other push has: earlier contents of the memory cannot be read again."""
    machine: str = Field(max_length=64)
    """``shared_memory.machine()`` of the trainer."""
    process: int = Field(ge=1)
    descriptor: int = Field(ge=0)
    """File descriptor of the memory in the trainer's process."""
    memory: str = Field(pattern="^[0-9a-f]{32}$")
    """Name of the memory."""
    tensors: tuple[UploadTensor, ...] = Field(min_length=1)
    """All tensors to come."""


class CudaIpcSource(SharedMemorySource):
    """A staging buffer in the trainer's GPU memory, refilled for each batch; offsets of ``SharedTensors`` refer to it.

    The shared host memory holds no tensors then. Opening it proves that both processes are of the same machine and
    user, and it exists for as long as the trainer's GPU memory.
    """

    transport: ClassVar[str] = "cuda_ipc"
    gpu: str = Field(max_length=64)
    """UUID of the trainer's GPU, for messages: the process that opens the handle need not see that GPU."""
    handle: str = Field(pattern="^[0-9a-f]{128}$")
    """``cudaIpcMemHandle_t`` of one allocation, in hex."""
    handle_bytes: int = Field(ge=1)
    """Usable size in bytes of that allocation."""


SHARED_ALIGNMENT = ALIGNMENT_BYTES
"""Alignment in bytes of each tensor in shared memory."""


class SharedTensors(Frozen):
    """Body of ``POST /v1/weights/{version}/shared``: tensors that the ingest may read now. Answered once it has read
    them.

    The batch has the announced tensors with the numbers ``first`` to ``first + count - 1``. They lie in the memory raw,
    little-endian and contiguous, at the offsets that ``placed`` yields.
    """

    transfer: str = Field(max_length=64)
    batch: int = Field(ge=0)
    """Number of the batch in its transfer: a repeated batch gets the same answer."""
    first: int = Field(ge=0)
    count: int = Field(ge=1)
    offset: int = Field(ge=0)
    """Offset in bytes of the first tensor, a multiple of ``SHARED_ALIGNMENT``."""

    _no_booleans = field_validator("batch", "first", "count", "offset", mode="before")(refuse_bool)


def placed(tensors: Iterable[UploadTensor], offset: int) -> Iterator[tuple[UploadTensor, int]]:
    """Yield each tensor with its offset in shared memory, beginning at ``offset``. Each offset is the next multiple of
    ``SHARED_ALIGNMENT`` after the tensor before; an empty tensor also takes that much."""
    for tensor in tensors:
        yield tensor, offset
        offset += aligned(max(tensor.nbytes, 1))


class Delta(Frozen):
    """Base of a delta. The parts then hold changes, not tensors: see ``delta_parts.py``."""

    base: WeightVersion
    """The version that is changed."""
    base_digest: str
    """``base_digest`` of the announced tensors in that version."""


class Slot(NamedTuple):
    """The place of a part."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Return the offset after its last byte."""
        return self.offset + self.nbytes


AnyAnnouncement = TypeVar("AnyAnnouncement", bound="Announcement")


class Announcement(Frozen):
    """Body of ``POST /v1/weights``: a tensor table followed by parts, or a source."""

    # JSON of scales that are not numbers, which are refused by name: null would not be read again
    model_config = ConfigDict(ser_json_inf_nan="constants")

    version: NewVersion
    """``next``: the ingest assigns a number."""
    tensors: tuple[UploadTensor, ...] = ()
    source: PathSource | BroadcastSource | CudaIpcSource | SharedMemorySource | None = None
    kv_scales: dict[str, float] | None = None
    """Scales of the FP8 KV cache for these weights, as ``KVScales.named()`` returns them: q, k and v of every attention
    layer. None: the service's ``kv_cache.scales_policy`` applies."""
    uploader: str = Field(default="", max_length=256)
    """A name that no other push has; empty: none."""
    label: VersionLabel | None = None
    delta: Delta | None = None
    """None: the parts hold the tensors themselves."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[type[Self], str]]:
        """Pickle as JSON: a table of 37 000 tensors takes a tenth of the time of pickling as many objects, and half to
        read."""
        return _from_json, (type(self), self.model_dump_json(exclude_defaults=True))

    @model_validator(mode="after")
    def _tensors_or_source(self) -> Self:
        if bool(self.tensors) == (self.source is not None):
            raise ValueError("give either tensors (then upload their parts) or source, not both and not neither")
        if self.version == NEXT and not self.uploader and self.label is None:
            raise ValueError("version next needs an uploader or a label, by which the same push is known again")
        return self

    @model_validator(mode="after")
    def _delta_of_an_older_version(self) -> Self:
        if self.delta is not None and self.source is not None:
            raise ValueError("the changes of a delta come in parts: give tensors, and no source")
        if self.delta is not None and self.version != NEXT and self.delta.base >= self.version:
            raise ValueError(f"version {self.version} cannot be a delta of version {self.delta.base}: of an older one")
        return self

    @property
    def announced_tensors(self) -> tuple[UploadTensor, ...]:
        """Return all tensors to come, in parts, as a delta, or through shared memory. Empty for other sources."""
        return self.source.tensors if isinstance(self.source, SharedMemorySource) else self.tensors

    @functools.cached_property
    def delta_parts(self) -> tuple[range, ...]:
        """Return the tensors that each part of a delta covers, as ranges of places."""
        return tensors_of_parts([tensor.nbytes for tensor in self.tensors])

    def num_parts(self, part_bytes: int) -> int:
        """Return the number of parts of the whole upload. ``part_bytes``: size of each part but the last, if it is no
        delta."""
        return math.ceil(self.nbytes / part_bytes) if self.delta is None else len(self.delta_parts)

    def slots(self, part_bytes: int) -> Iterator[Slot]:
        """Yield the place of each part in one memory. A part of a delta may be smaller than its slot."""
        if self.delta is None:
            for offset in range(0, self.nbytes, part_bytes):
                yield Slot(offset, min(part_bytes, self.nbytes - offset))
            return
        offset = 0
        for tensors in self.delta_parts:
            slot = Slot(offset, min(most_bytes([self.tensors[i].nbytes for i in tensors]), LARGEST_PART_BYTES))
            yield slot
            offset += aligned(slot.nbytes)

    @property
    def transport(self) -> str:
        """Return the name of the transport, for metrics."""
        if self.source is not None:
            return self.source.transport
        return "parts" if self.delta is None else "delta"

    @functools.cached_property
    def nbytes(self) -> int:
        """Return the size in bytes of all tensors that come in parts or as a delta. Cached: it is read for each part,
        of which there may be 500, and a version may have 37 000 tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def numbered(self, version: int) -> "BeginUpload":
        """Return the same announcement with that version number."""
        fields = {name: getattr(self, name) for name in Announcement.model_fields}
        return BeginUpload.model_validate({**fields, "version": version})


def _from_json(kind: type[AnyAnnouncement], text: str) -> AnyAnnouncement:
    return kind.model_validate_json(text)


class BeginUpload(Announcement):
    """An announcement whose version has its number."""

    version: WeightVersion

    def describes_what(self, other: "BeginUpload") -> bool:
        """Return True if both announce the same stream or source with the same KV scales, whichever uploader announces
        it."""
        mine = (self.version, self.tensors, self.source, self.kv_scales, self.delta)
        return mine == (other.version, other.tensors, other.source, other.kv_scales, other.delta)


class UploadPlan(Frozen):
    """Reply to ``POST /v1/weights``: the parts that the ingest still needs, and the address for them."""

    version: int
    state: Literal["staged", "committed"]
    part_bytes: int
    """Size in bytes of each part but the last, if it is no delta."""
    num_parts: int
    missing_parts: tuple[int, ...]
    digests: dict[int, str] = Field(default_factory=dict)
    """xxh3-128 in hex of each part that the ingest has."""
    upload_digest: str | None = None
    """Digest of the announced path's contents, for the commit; None: the upload has another source."""
    upload_url: str | None = None
    """Address that takes parts and batches of shared memory directly, with fewer hops than the service's own. None: no
    such address is known to be reachable for the caller."""
    upload_key: str | None = None
    """Shared secret of that address and the caller; valid for the parts of this version."""
    upload_certificate: str | None = None
    """The certificate of ``upload_url`` in PEM, if it is https. The caller must refuse any other. It may be self-signed
    and issued for another address."""


class ListenerProof(Frozen):
    """Reply to ``GET .../listener``."""

    proof: str
    """``listener_proof`` of the upload's key and the caller's nonce."""


class PartReceipt(Frozen):
    """Reply to ``PUT .../parts/{i}``: the part is stored and its digest was right."""

    version: int
    part: int
    nbytes: int
    digest: str


WaitFor = Literal["none", "all"]
"""The event after which a commit or rollback is answered: see ``HowToLoad.wait``."""


class HowToLoad(Frozen):
    """Options of a commit or rollback: how replicas load the version, and when the call is answered."""

    mode: PauseMode = "keep"
    """Treatment of running rollouts. ``keep`` continues them with the new weights, after recomputing their KV cache
    unless ``weights.kv_cache_on_update`` is ``keep``. ``wait`` lets them finish first; a group's samples that vLLM has
    not begun get the new weights. ``abort`` ends them in the engines, and each one's ``on_abort`` decides what
    follows."""
    wait: WaitFor = "none"
    """``all``: answer when every live replica serves this version. ``none``: answer after the commit."""
    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Maximum time in seconds for ``wait``, then 504."""

    _no_booleans = field_validator("timeout_s", mode="before")(refuse_bool)


class RollBack(HowToLoad):
    """Body of ``POST /v1/weights/rollback``."""

    to: KnownVersion
    """A version that is still on disk."""


class PullWeights(HowToLoad):
    """Body of ``POST /pull_weights``: slime's and miles's, with options."""

    source_dir: str | None = Field(default=None, pattern="^/", max_length=MAX_PATH_CHARACTERS)
    """Folder in which the trainer publishes versions as ``weight_v000007``, below ``weights.source_roots``."""
    uri: str | None = Field(default=None, pattern=URL, max_length=MAX_PATH_CHARACTERS)
    """URL of such a folder, below ``weights.source_urls``, in place of ``source_dir``."""
    target_version: WeightVersion
    """The trainer's number. 0 without such a folder is the model that the service was started with."""
    local_checkpoint_dir: str | None = Field(default=None, min_length=1, max_length=MAX_PATH_CHARACTERS)
    """None: serve the version. Otherwise, convert and verify it; ``/update_weights_from_disk`` with this path as
    ``model_path`` serves it. Nothing is written there."""
    wait: WaitFor = "all"

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        if (self.source_dir is None) == (self.uri is None):
            raise ValueError("give either source_dir or uri")
        return self

    @property
    def store(self) -> str:
        """Return the folder or the URL."""
        return self.source_dir or self.uri or ""


class CommitUpload(HowToLoad):
    """Body of ``POST /v1/weights/{version}/commit``."""

    upload_digest: str | None = None
    """``upload_digest`` of the caller's parts, ``with_kv_scales``, or that of the ``UploadPlan``; 409 if the ingest has
    other contents. None: commit those that are there."""


def listener_proof(key: str, nonce: str) -> str:
    """Return an HMAC-SHA256 in hex, which proves that a listener knows an upload's key without revealing the key."""
    return hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def upload_digest(part_digests: Iterable[str]) -> str:
    """Return xxh3-128 over the digests of all parts, in order."""
    return xxhash.xxh3_128_hexdigest("".join(part_digests).encode())


def base_digest(tensor_digests: Iterable[str]) -> str:
    """Return xxh3-128 over the digests of some tensors of a version, ``StoredTensor.digest``, in order."""
    return xxhash.xxh3_128_hexdigest("".join(tensor_digests).encode())


def with_kv_scales(digest: str, kv_scales: Mapping[str, float] | None) -> str:
    """Return the digest of weights together with their KV scales; without scales, that of the weights."""
    if kv_scales is None:
        return digest
    return xxhash.xxh3_128_hexdigest((digest + json.dumps(kv_scales, sort_keys=True)).encode())


class Listener(Frozen):
    """Address and credentials for sending parts of one version to the listener."""

    url: str
    key: str
    certificate: str | None = None
    """Certificate of the listener in PEM, if ``url`` is https."""
