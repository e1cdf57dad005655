"""The whole configuration: every section except those of one engine.

Every field has a default that works on one machine; unknown fields are an error. Paths may be relative to the directory
in which the service is started.
"""

import math
import os
import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rollout_service.config.engine import Config, EngineConfig, KVCacheConfig, QuantConfig
from rollout_service.protocol.base import KnownVersion, is_token
from rollout_service.protocol.upload import LARGEST_PART_BYTES, URL

_KV_MAX_AGE = 8
AUTO = Path("auto")
"""Value of ``weights.root`` with which the ingest chooses the folder."""
_REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_INGEST_SHARE = 0.1
"""The ingest's share of a GPU that it shares with an engine. Ray only counts it; the ingest uses little."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_STORE_URL = re.compile(f"{URL}.+")
_HOST_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?))(?::(\d{1,5}))?")


GroupName = Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
"""Name of a group of replicas, a part of the name of its Serve deployment."""


Resources = dict[str, Annotated[float, Field(gt=0)]]
"""Name of a custom resource of Ray → amount."""


def _require_custom(setting: str, resources: Resources, own: dict[str, str]) -> None:
    """Raise ValueError for a resource that has a setting of its own. ``own``: name → what to do instead."""
    if twice := sorted(own.keys() & resources.keys()):
        raise ValueError(f"{setting}.{twice[0]}: {own[twice[0]]}")


def _require_local(path: Path) -> Path:
    # it would name a folder "~", or "s3:", in the current one
    if str(path).startswith("~"):
        raise ValueError(f"{str(path)!r} begins with ~, which is not expanded here: write the whole path")
    if _URL.match(str(path)):
        raise ValueError(f"{str(path)!r} is a URL, and none is read here: write a path on this machine")
    return path


def _require_written_out(path: Path) -> Path:
    if "$" in str(path):
        begins = "begins with" if str(path).startswith("$") else "has"
        raise ValueError(f"{str(path)!r} {begins} a variable, and none is expanded here: write the whole path")
    return _require_local(path)


def _require_url(url: str) -> str:
    if _STORE_URL.fullmatch(url) is None:
        raise ValueError(f"{url!r} is no URL: write one such as s3://bucket/run; folders are in weights.source_roots")
    return url


def _require_store(store: str) -> str:
    if _STORE_URL.fullmatch(store) is None:
        _require_written_out(Path(store))
    return store


def _absolute_store(store: str | None) -> str | None:
    if store is None or _STORE_URL.fullmatch(store):
        return store and store.rstrip("/")
    return str(Path(store).absolute())


ExpandedPath = Annotated[Path, AfterValidator(_require_local)]
"""A path in which environment variables are expanded on each node."""
WholePath = Annotated[Path, AfterValidator(_require_written_out)]
"""A path in which nothing is expanded."""
Store = Annotated[str, Field(min_length=1), AfterValidator(_require_store)]
"""A folder or a URL with published versions."""


def host_and_port(address: str) -> tuple[str, int | None]:
    """Split ``host``, ``host:port`` or ``[::1]:port``. Raises ValueError for anything else."""
    match = _HOST_AND_PORT.fullmatch(address)
    port = int(match[3]) if match is not None and match[3] else None
    if match is None or (port is not None and not 0 < port <= 65535):
        raise ValueError(f"{address!r} is no address: write a host such as 10.1.0.7 or rollouts.example, or host:port")
    return match[1] or match[2], port


def _check_advertised(address: str) -> str:
    host, _ = host_and_port(address)
    if host in (*_LOOPBACK, "0.0.0.0", "::"):
        raise ValueError(
            f"{address!r} is no address at which another machine reaches this one: give its name or IP address"
        )
    return address


def expanded(setting: str, path: Path) -> Path:
    """Return an absolute path with the environment variables of this node. Raises ValueError for an undefined
    variable."""
    found = os.path.expandvars(path)
    if "$" in found:
        raise ValueError(
            f"{setting} is {path}, and on {os.uname().nodename} that is {found}: set the variable where Ray is started"
        )
    return Path(found).absolute()


def _require_ascii(path: Path) -> None:
    # the path is a label of vLLM's metrics, which Ray takes in ASCII alone
    if not str(path).isascii():
        raise ValueError(
            f"model.path={path} has characters beyond ASCII, with which engines do not start: rename the folder, or "
            "name a symbolic link to it (ln -s)"
        )


class ModelConfig(Config):
    """The served model."""

    path: Path = Path("models/tiny-qwen3")
    """Folder of the model in Hugging Face's layout, or a repository on the hub, such as ``Qwen/Qwen3-8B``. Version 0 is
    read from it. Environment variables in it, such as ``$SCRATCH/model``, are expanded on each node, with the values at
    Ray's start there.

    An existing folder takes precedence. Every node downloads the files that it needs from the hub into its ``HF_HOME``,
    with the value at Ray's start there.
    """

    revision: str | None = None
    """Branch, tag or commit of the hub repository in ``path``; None: its default branch. All processes use the commit
    that it names when the service starts, and the log of weight versions belongs to that commit."""

    served_name: str | None = None
    """The name in ``/v1/models`` and in requests; None: the folder's name, or the repository's id."""

    aliases: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(default=(), max_length=64)
    """Further names that requests may use, such as the trainer's name or path of the model."""

    create: Literal["tiny-qwen3"] | None = None
    """Create this small random model at ``path`` if nothing is there. None: a missing folder is an error."""

    @model_validator(mode="after")
    def _settings_fit(self) -> "ModelConfig":
        if self.revision is not None and self.repo_id is None:
            raise ValueError(
                f"model.revision is {self.revision}, but model.path={self.path} is no repository on the Hugging Face "
                "hub, such as Qwen/Qwen3-8B: leave it out"
            )
        _require_ascii(self.path)
        if self.create is not None:
            _require_local(self.path)
        if self.served_name is None and "$" in self.path.name:
            raise ValueError(f"model.path={self.path} expands differently on each node: set model.served_name")
        return self

    def here(self) -> "ModelConfig":
        """Return the section with ``path`` expanded on this node. Raises ValueError for an undefined variable."""
        if "$" not in str(self.path):
            return self
        path = expanded("model.path", self.path)
        _require_ascii(path)
        return self.model_copy(update={"path": path, "served_name": self.name})

    @property
    def repo_id(self) -> str | None:
        """Return the repository on the hub; None: the model is in a folder, or is created there."""
        named = str(self.path)
        if self.create is not None or _REPO_ID.fullmatch(named) is None:
            return None
        return named if self.revision is not None or not self.path.exists() else None

    @property
    def name(self) -> str:
        """Return the model's name for clients."""
        return self.served_name or self.repo_id or self.path.name


class GroupConfig(Config):
    """Replicas that are pinned to one weight version, for example to evaluate it during training."""

    version: KnownVersion
    """Number or label of the version. A label means its newest version: a push with the label moves the group. While
    the log has no such version, the group follows the newest one."""

    replicas: int = Field(default=1, ge=1)
    """Number of replicas, in addition to ``scaling.max_replicas``. It is not scaled automatically."""


class ScalingConfig(Config):
    """The number of replicas, and the resources that each requests from Ray."""

    min_replicas: int = Field(default=1, ge=0)
    """Minimum number of replicas. With 0, the first request waits until an engine has started."""

    max_replicas: int = Field(default=1, ge=1)
    """Maximum number of replicas. If equal to ``min_replicas``, there is no autoscaling."""

    target_sequences: float = Field(default=128, gt=0)
    """Autoscaling target: running and waiting sequences per replica. Keep it below ``engine.max_num_seqs``, so that a
    burst is decoded and not queued."""

    target_kv_usage: float = Field(default=0.8, gt=0, le=1)
    """Autoscaling target: share of a replica's KV cache in use. Above it, vLLM soon preempts sequences."""

    upscale_delay_s: float = Field(default=5, ge=0)
    """Time in seconds that high load must last before replicas are added. Loads arrive every 10 s."""

    downscale_delay_s: float = Field(default=600, ge=0)
    """Time in seconds that low load must last before replicas are removed. It should exceed a trainer's step, or every
    step costs an engine's start. Time in which the fleet is paused or loads a version does not count."""

    num_cpus: float = Field(default=1, ge=0)
    """CPUs that Ray reserves for a replica. On a machine without a GPU also the number of its engine's threads, if
    there may be several engines; a single one uses all cores but one."""

    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a replica. None: if vLLM is built for GPUs, ``engine.tensor_parallel_size``, minus the
    ingest's share if that is 1; else 0. Ray can only share a single GPU, so a number above 1 must be whole."""

    resources: Resources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a replica, to select its nodes. ``{"rollout_node": 1}`` selects nodes
    started with that resource, ``{"accelerator_type:H100": 0.001}`` a kind of GPU."""

    gateways: int = Field(default=1, ge=1)
    """Number of gateways, the processes that answer HTTP. With 2 or more, requests are still answered while one is
    replaced.

    Each uses one core at most.
    """

    drain_timeout_s: float = Field(default=30, gt=0)
    """Time in seconds that a process gets to end after SIGTERM, when scaling down, or when a node is drained. Running
    rollouts continue for two thirds of it; other replicas then continue the rest. In the remaining third, replies are
    sent and engines end. Set it to at most the notice that your machines get; a pod gets 30 s by default."""

    groups: dict[GroupName, GroupConfig] = Field(default_factory=dict)
    """Groups of further replicas, each pinned to a weight version: ``{"eval": {"version": "golden", "replicas": 1}}``.
    Only requests with that ``exact_version`` reach them."""

    @model_validator(mode="after")
    def _settings_fit(self) -> "ScalingConfig":
        own = {"CPU": "set scaling.num_cpus", "GPU": "set scaling.num_gpus"}
        _require_custom("scaling.resources", self.resources, own)
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}: raise it")
        return self

    @property
    def pinned_replicas(self) -> int:
        """Return the number of replicas in ``groups``."""
        return sum(group.replicas for group in self.groups.values())

    @property
    def on_gpus(self) -> bool:
        """Return True if replicas request GPUs."""
        return bool(self.num_gpus)

    @property
    def autoscaled(self) -> bool:
        """Return True if the number of replicas may change."""
        return self.max_replicas > self.min_replicas


class WeightsConfig(Config):
    """The log of weight versions, and the ingest that writes it."""

    root: ExpandedPath = AUTO
    """Folder of the weight log, on the ingest's node, or ``auto``. ``auto``: in the host's memory, below /dev/shm and
    private to the user, if the host has enough memory, else ``disk_root``. ``GET /v1/fleet`` shows the choice and the
    reason. A log in memory is lost if the host crashes; trainers then push again from a checkpoint. An existing log is
    continued wherever it lies.

    Environment variables in it, such as ``$SCRATCH``, are expanded on each node, with the values at Ray's start there.

    Replicas that find the ingest's log under this path read it there, also on other nodes with a shared file system. On
    a node that does not see the log, the path must be a local folder. Its replicas fetch versions through Ray's object
    store into ``<root>/copies``, once per node, and keep the newest version, the one before, and those that they serve.
    Replicas tell both cases apart by a file that they compare with the ingest.

    On a tmpfs, such as a folder below /dev/shm, updates are several times faster. It needs the memory of
    ``keep_versions`` versions and one more (at least three), and is lost if the host crashes.
    """

    disk_root: ExpandedPath = Path("out/weights")
    """Folder of the weight log if ``root`` is ``auto`` and memory has no room. Environment variables as in
    ``root``."""

    keep_versions: int = Field(default=2, ge=1)
    """Number of committed versions in the log. Older ones are removed once no live replica serves them. The one before
    the newest is always kept: a starting replica may be reading it."""

    kv_cache_on_update: Literal["drop", "keep"] = "drop"
    """``drop``: every update empties the KV cache, and running rollouts compute theirs again. ``keep``: running
    rollouts and sessions continue with keys and values of older weights. See docs/kv_cache.md."""

    kv_max_age: Annotated[int, Field(ge=0)] | Literal["auto"] | None = _KV_MAX_AGE
    """Maximum age of kept keys and values, as a difference of version numbers. An update recomputes those of running
    rollouts that began with older versions, and no others. None: unbounded. ``auto``: raised by one while the trainer
    reports no suspect mismatch for the oldest ones, and halved once it does (``monitor.suspect_k3``,
    ``monitor.suspect_prob_error``)."""

    part_bytes: int = Field(default=16 << 20, ge=1 << 10, le=LARGEST_PART_BYTES)
    """Size in bytes of an upload's parts, which the ingest requests from trainers."""

    ingest_num_gpus: float | None = Field(default=None, ge=0)
    """GPUs, or a share of one, that Ray reserves for the ingest's quantization; 0: it uses the CPU. For an
    engine on the same GPU, ``scaling.num_gpus`` must leave that share free. None: 0.1 if a replica has one GPU,
    ``scaling.num_gpus`` is also None and ``quant.weights`` is not ``none``; else 0."""

    ingest_resources: Resources = Field(default_factory=dict)
    """Ray resources of the ingest: ``{"node:__internal_head__": 0.001}`` keeps it on the head node. The ingest must
    stay on the node with the log if ``root`` is a local disk."""

    source_roots: tuple[WholePath, ...] = ()
    """Folders that may contain a ``source: {path}``; empty: only uploads are accepted."""

    source_urls: tuple[Annotated[str, AfterValidator(_require_url)], ...] = ()
    """URLs below which ``/pull_weights`` may read versions, such as ``s3://bucket/run``. fsspec reads them: ``s3://``
    needs the package s3fs, ``gs://`` gcsfs, and credentials in the environment."""

    watch: Store | None = None
    """Folder or URL whose newest version the service pulls and serves by itself, looking every ``poll_s``. It must be
    below ``source_roots`` or ``source_urls``, and its versions need an index. None: trainers announce them."""

    publish: Store | None = None
    """Folder or URL, for this service alone, into which the ingest writes the newest version after commits. Versions
    that are replaced meanwhile are skipped. Services on other clusters follow it by ``watch``, and their versions have
    the same digests. It must begin empty. None: nowhere."""

    trainer_root: WholePath | None = None
    """Folder for this service alone, on the ingest's node, of the weights that delta folders change, in the trainer's
    dtype. They are there from the first delta on. None: ``trainer`` in the log's folder."""

    upload_host: str = "127.0.0.1"
    """Address on which the ingest listens for parts. Each part needs a key, which the gateway gives to callers that may
    push.

    On loopback, trainers on its machine send parts there, and all others through the gateway, which must then run on
    the ingest's node. With ``0.0.0.0`` a trainer gets the address at which it reached the service if that is the
    ingest's machine, else the address of the ingest's node.
    """

    upload_port: int = Field(default=0, ge=0, le=65535)
    """Port of the listener; 0: any free port."""

    upload_advertise_address: Annotated[str, AfterValidator(_check_advertised)] | None = None
    """Host, or host:port, at which trainers reach the listener: a name, a load balancer, a NodePort. None: an address
    of its node, derived from ``upload_host``. Trainers that cannot reach it send parts through the gateway. Gateways
    use the listener's own address."""

    upload_ssl_certfile: WholePath | None = None
    """File in PEM, on the ingest's node, with the listener's certificate. None: it uses plain HTTP, and trainers that
    reach the service by https send parts through the gateway. It may be self-signed, and for any name: trainers get it
    from the gateway."""

    upload_ssl_keyfile: WholePath | None = None
    """File in PEM with the certificate's key, unencrypted."""

    poll_s: float = Field(default=5.0, gt=0)
    """Maximum time in seconds until a replica reads the log again if no wake-up call has reached it."""

    staged_ttl_s: float = Field(default=3600.0, gt=0)
    """Time in seconds without activity after which an upload is dropped. Until then it survives a restart of the
    ingest."""

    lock_wait_s: float = Field(default=60.0, ge=0)
    """Maximum time in seconds that a starting ingest waits for another one to release the log."""

    dead_after_s: float = Field(default=20.0, gt=0)
    """Time in seconds without a report after which a replica is considered dead."""

    def root_here(self) -> Path:
        """Return ``root`` on this node. Raises ValueError for ``auto``, or for an undefined variable."""
        if self.root == AUTO:
            raise ValueError("weights.root is auto, and the ingest has not chosen a folder yet")
        return expanded("weights.root", self.root)

    def disk_root_here(self) -> Path:
        """Return ``disk_root`` on this node. Raises ValueError for an undefined variable."""
        return expanded("weights.disk_root", self.disk_root)

    @property
    def upload_certificate(self) -> tuple[Path, Path] | None:
        """Return the files of the listener's certificate and its key; None: it has none."""
        if self.upload_ssl_certfile is None or self.upload_ssl_keyfile is None:
            return None
        return self.upload_ssl_certfile, self.upload_ssl_keyfile

    @model_validator(mode="after")
    def _settings_fit(self) -> "WeightsConfig":
        own = {"CPU": "leave it out, as the ingest reserves none", "GPU": "set weights.ingest_num_gpus"}
        _require_custom("weights.ingest_resources", self.ingest_resources, own)
        given = {"upload_ssl_certfile": self.upload_ssl_certfile, "upload_ssl_keyfile": self.upload_ssl_keyfile}
        missing = [name for name, file in given.items() if file is None]
        if len(missing) == 1:
            [there] = given.keys() - missing
            raise ValueError(f"weights.{there} is set, but not weights.{missing[0]}: TLS needs both, or leave both out")
        if self.upload_advertise_address is not None and self.upload_host in _LOOPBACK:
            raise ValueError(
                f"weights.upload_advertise_address is {self.upload_advertise_address}, but weights.upload_host is "
                f"{self.upload_host}, which only programs on the ingest's machine reach: set it to 0.0.0.0"
            )
        if self.upload_advertise_address is not None and self.upload_port == 0:
            raise ValueError(
                f"weights.upload_advertise_address is {self.upload_advertise_address}, but weights.upload_port is 0, "
                "so that each start takes another port: choose one"
            )
        if self.kv_cache_on_update == "drop" and self.kv_max_age not in (0, _KV_MAX_AGE):
            raise ValueError(
                f"weights.kv_max_age is {self.kv_max_age}, but weights.kv_cache_on_update is drop, which keeps no "
                "older keys and values: set it to keep, or leave kv_max_age out"
            )
        if self.publish is not None and _absolute_store(self.publish) == _absolute_store(self.watch):
            raise ValueError(f"weights.publish and weights.watch are both {self.publish}: publish into another store")
        if self.dead_after_s <= 2 * self.poll_s:
            raise ValueError(
                f"dead_after_s={self.dead_after_s} must be more than twice poll_s={self.poll_s}: "
                "an idle replica reports once per poll"
            )
        return self


class MonitorConfig(Config):
    """Statistics of the mismatch between engines and trainer, and thresholds for suspect versions."""

    ratio_bound: float = Field(default=2.0, gt=1)
    """C: tokens with a probability ratio outside [1/C, C] are counted. Weights are truncated at C for the effective
    sample size. Use the cap of the trainer's TIS, if it has one."""

    suspect_k3: float = Field(default=0.01, gt=0)
    """Threshold of k3, in nats per token, above which a version on a replica is suspect."""

    suspect_prob_error: float = Field(default=1.05, gt=1)
    """Threshold of mean(min(exp |trainer − rollout|, 10)) above which a version on a replica is suspect."""

    min_tokens: int = Field(default=2000, ge=1)
    """Minimum number of measured tokens before a version on a replica can be suspect."""


def _network(value: object) -> object:
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        if isinstance(value, str):  # of a number, ipaddress would make an address
            return ip_network(value)
        problem = f"{value!r} is not text"
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"{problem}: write a network as 10.1.0.0/16 or fd00:1::/32, or one address")


Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]


class AuthConfig(Config):
    """Access to the routes that move weights and pause engines."""

    token_file: WholePath | None = None
    """File with the bearer token of the guarded routes, on the nodes of gateways and ingest. Guarded are the weight,
    control and mismatch routes. Whitespace around the token is ignored. None: these routes only answer programs on this
    machine, neither web pages nor requests through a proxy. A proxy on this machine that adds no header looks like a
    program, and needs a token."""

    trusted_networks: tuple[Network, ...] = ()
    """IPv4 and IPv6 networks whose machines need no token on the guarded routes. They are for trainers that cannot send
    a token: TRL, SkyRL, slime, AReaL. Web pages and requests through a proxy are refused from there, too. Any machine
    in such a network can replace the model's weights: list only the trainer's nodes, not a network shared with others.
    Requests through a NAT or a load balancer have its address."""

    @model_validator(mode="before")
    @classmethod
    def _not_in_the_configuration(cls, data: object) -> object:
        if isinstance(data, dict) and "token" in data:
            raise ValueError(
                "auth.token is refused: Ray logs configurations and shows them on its dashboard; write a new token "
                "into a file, and name the file in auth.token_file"
            )
        return data

    def secret(self) -> str | None:
        """Return the token; None if none is configured.

        Raises OSError if the file cannot be read, ValueError for an invalid token.
        """
        if self.token_file is None:
            return None
        token = self.token_file.read_text().strip()
        if not token:
            raise ValueError(f"auth.token_file {self.token_file} is empty: write the token into it")
        if not is_token(token):
            raise ValueError(
                f"auth.token_file {self.token_file} is not one word of printable ASCII, as HTTP headers need: write "
                "the token alone into it"
            )
        return token


class ChatConfig(Config):
    """Conversion of messages to prompts and of completions to messages, under vLLM's names."""

    chat_template: WholePath | None = None
    """File with a Jinja template. None: that of the model's tokenizer."""

    tool_parser: str | None = None
    """vLLM's ``--tool-call-parser``, such as ``hermes``. With it a model may choose to call tools. None: requests with
    tools must have ``tool_choice: "none"``."""

    reasoning_parser: str | None = None
    """vLLM's ``--reasoning-parser``, such as ``qwen3``. The model's reasoning becomes ``message.reasoning``."""


class ServiceConfig(Config):
    """The whole service."""

    model: ModelConfig = ModelConfig()
    """The served model."""
    quant: QuantConfig = QuantConfig()
    """Quantization of its weights."""
    engine: EngineConfig = EngineConfig()
    """One engine."""
    kv_cache: KVCacheConfig = KVCacheConfig()
    """The KV cache and its scales."""
    chat: ChatConfig = ChatConfig()
    """Chats."""
    scaling: ScalingConfig = ScalingConfig()
    """Number and resources of replicas."""
    weights: WeightsConfig = WeightsConfig()
    """Storage and upload of weight versions."""
    monitor: MonitorConfig = MonitorConfig()
    """Statistics of the mismatch."""
    auth: AuthConfig = AuthConfig()
    """Access control of weights and engines."""

    @model_validator(mode="after")
    def _settings_fit(self) -> "ServiceConfig":
        engines, gpus = self.engine.tensor_parallel_size, self.scaling.num_gpus
        if gpus and (gpus > 1 if engines == 1 else gpus != engines):
            raise ValueError(_wrong_gpus(gpus, engines, self.weights.ingest_num_gpus))
        share = self.weights.ingest_num_gpus
        if share and share > 1:
            raise ValueError(
                f"weights.ingest_num_gpus={share:g}, and the ingest quantizes on one GPU: set it to 1 at most"
            )
        gib = self.engine.kv_offload_gib
        if gib is not None and self.weights.kv_cache_on_update == "drop":
            raise ValueError(
                f"engine.kv_offload_gib={gib:g}, but weights.kv_cache_on_update is drop: set it to keep, with "
                "weights.kv_max_age: 0 if no token may read older keys and values"
            )
        return self

    @property
    def sequences_per_gateway(self) -> int:
        """Return the part of a replica's admission limit that is reserved for each gateway."""
        return max(1, self.engine.sequences_per_replica // self.scaling.gateways)

    @property
    def engine_kernels(self) -> Literal["cpu", "cuda_eager", "cuda_compiled"] | None:
        """Return the kernels of the engines, see ``TrainerRecipe``; None: not known."""
        if self.scaling.num_gpus is None:
            return None
        return self.engine.gpu_kernels if self.scaling.on_gpus else "cpu"

    @property
    def _ingest_beside_an_engine(self) -> bool:
        """Return True if the ingest may have a share of a GPU by default."""
        alone = self.engine.tensor_parallel_size == 1 and self.scaling.num_gpus is None
        return alone and self.quant.weights != "none"

    def with_gpus(self, on_gpus: bool) -> "ServiceConfig":
        """Return the configuration with the GPUs of each process filled in. ``on_gpus``: True if vLLM is built for
        GPUs."""
        engines, share, gpus = self.engine.tensor_parallel_size, self.weights.ingest_num_gpus, self.scaling.num_gpus
        if share is None:
            share = _INGEST_SHARE if on_gpus and self._ingest_beside_an_engine else 0
        if gpus is None and not on_gpus:
            gpus = 0
        elif gpus is None:
            gpus = 1 - share if engines == 1 and share < 1 else engines
        return self.model_copy(
            update={
                "scaling": self.scaling.model_copy(update={"num_gpus": gpus}),
                "weights": self.weights.model_copy(update={"ingest_num_gpus": share}),
            }
        )

    def resolved(self) -> "ServiceConfig":
        """Return the configuration with absolute paths, to be sent to other processes.

        Raises ValueError if the model's path has characters beyond ASCII, as the current directory may.
        """
        root, disk = self.weights.root, self.weights.disk_root
        of_node = self.model.repo_id is not None or str(self.model.path).startswith("$")
        model = self.model.path if of_node else self.model.path.absolute()
        if not of_node:
            _require_ascii(model)
        template = self.chat.chat_template and self.chat.chat_template.absolute()
        certfile, keyfile = self.weights.upload_ssl_certfile, self.weights.upload_ssl_keyfile
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"path": model}),
                "chat": self.chat.model_copy(update={"chat_template": template}),
                "weights": self.weights.model_copy(
                    update={
                        "root": root if root == AUTO or str(root).startswith("$") else root.absolute(),
                        "disk_root": disk if str(disk).startswith("$") else disk.absolute(),
                        "trainer_root": self.weights.trainer_root and self.weights.trainer_root.absolute(),
                        "upload_ssl_certfile": certfile and certfile.absolute(),
                        "upload_ssl_keyfile": keyfile and keyfile.absolute(),
                        "source_roots": tuple(p.resolve() for p in self.weights.source_roots),
                        "watch": _absolute_store(self.weights.watch),
                        "publish": _absolute_store(self.weights.publish),
                    }
                ),
                "auth": self.auth.model_copy(
                    update={"token_file": self.auth.token_file and self.auth.token_file.absolute()}
                ),
            }
        )


def _wrong_gpus(gpus: float, engines: int, ingest: float | None) -> str:
    if engines == 1:
        return (
            f"scaling.num_gpus={gpus:g}, and engine.tensor_parallel_size is 1, so that an engine uses one GPU: set it "
            f"to 1 or a share of one, or engine.tensor_parallel_size: {math.ceil(gpus)}"
        )
    message = (
        f"scaling.num_gpus={gpus:g}, and engine.tensor_parallel_size={engines} takes {engines} whole GPUs, as Ray "
        f"shares out a single one only: set it to {engines}, or leave it out"
    )
    if ingest:
        message += f"; weights.ingest_num_gpus={ingest:g} is then of another GPU, and with 0 the ingest uses the CPU"
    return message
