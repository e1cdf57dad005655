"""LoRA adapters: versions of named adapters, their upload, and their state on replicas."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from rollout_service.protocol.base import Frozen, KnownVersion, NewVersion, VersionLabel, WeightVersion, refuse_bool

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
AdapterName = Annotated[str, Field(pattern=f"^{_NAME}$")]
"""Letters, digits and ``._-``. Requests may append ``@`` and a version."""
VersionedName = Annotated[str, Field(pattern=f"^{_NAME}(@[0-9]{{1,15}})?$")]
"""A name, or a name with ``@`` and a version."""
_ASKED = re.compile(f"({_NAME})(?:@([0-9]{{1,16}}))?")
"""``MAX_VERSION`` has 16 digits."""

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of an adapter's files."""
ADAPTER_PART_BYTES = 32 << 20
"""Size in bytes of an upload's parts; the last one may be shorter."""


class AdapterVersion(Frozen):
    """A committed version of a named adapter. Immutable."""

    name: str
    version: int
    digest: str
    """xxh3-128 of its configuration and of its tensors' xxh3-128."""
    base_version: int
    """The weight version that it belongs to."""
    base_digest: str
    """Digest of that version. Replicas that serve other weights do not serve the adapter."""
    rank: int
    """The largest rank of its modules."""
    nbytes: int
    """Size of its tensors' file in bytes."""
    label: str | None = None
    """The trainer's label of the version."""
    rollback_of: int | None = None
    """The version whose files it has. None: they were pushed."""

    @property
    def folder(self) -> str:
        """Return its folder in the log's ``adapters``."""
        return f"{self.name}/{self.version}-{self.digest}"

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


class HeldAdapter(Frozen):
    """An adapter version on one replica."""

    name: str
    version: int
    digest: str
    running: int = 0
    """Rollouts that it samples now."""
    error: str | None = None
    """The reason why it could not be loaded. None: it is loaded."""

    def is_of(self, adapter: AdapterVersion) -> bool:
        """Return True if this is that version. The digest alone is not enough: two names may have the same files."""
        mine, others = (self.name, self.version, self.digest), (adapter.name, adapter.version, adapter.digest)
        return mine == others


class WantedAdapter(Frozen):
    """The adapter that samples a rollout."""

    name: str
    min_version: int | None = None
    exact_version: int | None = None
    """None: the newest that the replica holds."""

    def accepts(self, version: int) -> bool:
        """Return True if this version of the adapter qualifies."""
        return version == self.exact_version if self.exact_version is not None else version >= (self.min_version or 0)

    def __str__(self) -> str:
        if self.exact_version is not None:
            return f"{self.name}@{self.exact_version}"
        return self.name if self.min_version is None else f"{self.name}@{self.min_version} or newer"


def read_adapter_name(asked: str) -> tuple[str, int | None] | None:
    """Return the name and the exact version in ``run-a`` or ``run-a@3``. None: it is no adapter's name."""
    found = _ASKED.fullmatch(asked)
    return None if found is None else (found[1], None if found[2] is None else int(found[2]))


class BeginAdapter(Frozen):
    """Body of ``POST /v1/adapters/{name}``."""

    config: dict[str, JsonValue]
    """PEFT's ``adapter_config.json``."""
    digest: str = Field(pattern="^[0-9a-f]{32}$")
    """xxh3-128 of ``adapter_model.safetensors``, in hex."""
    nbytes: int = Field(ge=9)
    """Size of that file in bytes."""
    nonce: str | None = Field(default=None, pattern="^[0-9a-f]{32}$")
    """Random digits of a client that would write the file itself. See ``AdapterUpload.folder``."""


class AdapterOptions(Frozen):
    """Version, base and label of an adapter, and when its commit is answered."""

    version: NewVersion = "next"
    """A number above the adapter's newest version. ``next``: the following one."""
    base_version: KnownVersion | None = None
    """The weight version that it was trained on, which must be the newest. None: the newest."""
    label: VersionLabel | None = None
    wait: Literal["none", "all"] = "none"
    """``all``: answer when every live replica holds the version. ``none``: answer after the commit."""
    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Maximum time in seconds for ``wait``, then 504."""

    _no_booleans = field_validator("timeout_s", mode="before")(refuse_bool)


class CommitAdapter(AdapterOptions):
    """Body of ``POST /v1/adapters/{name}/commit``: commits an upload, a folder, or an older version again."""

    digest: str | None = None
    """``AdapterUpload.digest``."""
    path: str | None = Field(default=None, max_length=4096)
    """A folder in PEFT's format below ``weights.source_roots``, as the ingest sees it."""
    rollback_to: WeightVersion | None = None
    """A version of the adapter that is kept, whose files become the newest version."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.digest, self.path, self.rollback_to].count(None) != 2:
            raise ValueError("give one of the digest of an upload, the path of a folder, and rollback_to")
        return self


class AdapterUpload(Frozen):
    """Answer to ``BeginAdapter``."""

    digest: str
    """The adapter's digest, by which its parts and its commit name the upload."""
    missing: tuple[int, ...]
    """The parts that have not arrived."""
    part_bytes: int = ADAPTER_PART_BYTES
    folder: str | None = None
    """The folder of the upload on the ingest's host. A client that finds a file named by its nonce there is on this
    host, and may write ``adapter_model.safetensors`` there in place of sending parts. None: no nonce was sent."""


class AdapterStatus(AdapterVersion):
    """An adapter version, and the replicas that hold it."""

    replicas: tuple[str, ...] = ()
    """Live replicas that hold it."""
    errors: dict[str, str] = Field(default_factory=dict)
    """Replica → reason why it could not load the version."""
    running: int = 0
    """Rollouts that it samples now, on all replicas, as last reported."""


class Adapters(Frozen):
    """Every committed adapter version, oldest first."""

    adapters: tuple[AdapterStatus, ...]
