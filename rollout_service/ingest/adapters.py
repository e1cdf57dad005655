"""LoRA adapters at the ingest: uploads, checks, commits, and the versions that replicas should hold."""

import asyncio
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    DigestMismatch,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.fleet.coordinator import FleetCoordinator
from rollout_service.ingest.exclusive import exclusive
from rollout_service.ingest.sources.folder import SourceFile, allowed_path
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.adapters import (
    ADAPTER_PART_BYTES,
    CONFIG_FILE,
    TENSORS_FILE,
    AdapterStatus,
    AdapterUpload,
    AdapterVersion,
    BeginAdapter,
    CommitAdapter,
)
from rollout_service.protocol.base import MAX_VERSION, NEXT
from rollout_service.protocol.weight_log import Head
from rollout_service.runtime.tasks import ClosableLock, ShieldedTasks
from rollout_service.store.adapters import ADAPTER_FILES, AdapterStore, adapter_digest, digest_of, tensors_digest
from rollout_service.store.durable_io import DISK_FULL, make_private, no_room, not_written, write_synced
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog

logger = logging.getLogger(__name__)

MIN_UPLOADS = 16
"""Number of uploads that are kept until they are committed, or more: two for each version that may be live. A further
one removes the one to which nothing has come for the longest time."""
_MAX_CONFIG_BYTES = 1 << 20
_MAX_ALPHA = 2.0**64
"""Maximum ``lora_alpha``: a tensor that is multiplied by infinity or NaN makes every logprob NaN."""
_WEIGHT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_IDLE_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of ``init_lora_weights`` that leave the base model as it is. PiSSA, OLoRA, CorDA and LoftQ change it."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias",
    "alora_invocation_tokens": "aLoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "fused experts (target_parameters)",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Fields of PEFT's configuration that vLLM does not implement, or would ignore."""


class AdapterIngest:
    """The committed versions of adapters, and their uploads. Its coroutines are for other processes: see
    ``IngestCalls``."""

    def __init__(
        self,
        config: ServiceConfig,
        log: WeightLog,
        model: ServedModel,
        fleet: FleetCoordinator,
        labels: VersionLabels,
        writing: ClosableLock,
    ) -> None:
        """``writing``: held by the task that writes the log."""
        self._config, self._store, self._model = config, AdapterStore(log.root), model
        self._fleet, self._log, self._labels, self._writing = fleet, log, labels, writing
        self._limits = config.engine.adapters
        self._uploads: dict[tuple[str, str], _Upload] = {}
        self._shielded = ShieldedTasks()
        self.live: tuple[AdapterVersion, ...] = ()
        """The committed versions that replicas should hold, oldest first."""

    def open(self, head: Head) -> None:
        """Read the committed versions. Raises LogCorrupt, OSError, InvalidRequest for a name of the served model.

        Versions for other weights than ``head`` are dropped, and the oldest for which ``engine.adapters.max_live`` has
        no room any more.
        """
        self._store.clear_staging()
        found, room = self._store.read(), self._limits.max_live
        kept = self._kept(tuple(adapter for adapter in found if adapter.base_digest == head.digest))
        self.live = kept[len(kept) - min(len(kept), room) :]
        for adapter in self.live:
            if self._is_of_model(adapter.name):
                raise InvalidRequest(
                    f"the log's adapter {adapter} has a name of the served model, which would get its requests: take "
                    f"{adapter.name!r} out of model.aliases or change model.served_name; or start with the names that "
                    f"the model had, and DELETE /v1/adapters/{adapter.name}"
                )
        if self.live != found:
            lost = ", ".join(str(adapter) for adapter in found if adapter not in self.live)
            logger.warning(
                "adapters %s are dropped: their base is not version %d (%s), or engine.adapters.max_live=%d has no "
                "room for them",
                lost, head.version, head.digest, room,
            )  # fmt: skip
            self._store.set(self.live)

    def newest(self, name: str) -> AdapterVersion | None:
        """Return the newest version of an adapter."""
        return next((adapter for adapter in reversed(self.live) if adapter.name == name), None)

    def require_none(self) -> None:
        """Raise VersionConflict if the base cannot be replaced, because adapters belong to it."""
        if names := sorted({adapter.name for adapter in self.live}):
            raise VersionConflict(
                f"the adapters {', '.join(names)} belong to the served weights, and new weights would change what they "
                "sample: DELETE /v1/adapters/{name} first",
                {"adapters": names},
            )

    @exclusive
    async def begin(self, name: str, begin: BeginAdapter) -> AdapterUpload:
        """Start or resume an upload. Raises InvalidManifest, InvalidRequest, VersionConflict, InsufficientStorage,
        LogCorrupt, RolloutServiceError."""
        self._fleet.require_followed()
        try:
            return await asyncio.to_thread(self._begin, name, begin)
        except OSError as error:
            raise not_written(f"adapter {name} cannot be uploaded", error, "push it again") from error

    async def part(self, name: str, digest: str, index: int, content: bytes) -> None:
        """Store one part of an upload. Raises NotFound, InvalidRequest, InsufficientStorage, RolloutServiceError."""
        if (upload := self._uploads.get((name, digest))) is None:
            raise _no_upload(name, digest)
        what = f"part {index} of adapter {name}"
        try:
            with self._needing(what, len(content)):
                await asyncio.to_thread(upload.write, index, content)
        except FileNotFoundError as error:  # its folder is gone
            raise _no_upload(name, digest) from error
        except OSError as error:
            raise not_written(f"{what} was not stored", error, "send it again") from error

    async def commit(self, name: str, request: CommitAdapter) -> AdapterStatus:
        """Commit an upload or a folder, and wait for the replicas as requested. Repeating the commit gets the same
        answer.

        Raises NotFound, UploadIncomplete, DigestMismatch, InvalidManifest, InvalidRequest, VersionConflict, Forbidden,
        InsufficientStorage, RolloutServiceError, CommitTimeout, or LogCorrupt if a replica cannot load it.
        """
        adapter = await self._commit(name, request)
        if request.wait == "all":
            await self._fleet.wait_adapter(adapter, request.timeout_s)
        await self._sweep()
        return self._status(adapter)

    @exclusive
    async def remove(self, name: str) -> None:
        """Remove all versions of an adapter. Running rollouts finish. Raises NotFound, InsufficientStorage, LogCorrupt,
        RolloutServiceError."""
        self._fleet.require_followed()
        if self.newest(name) is None:
            known = sorted({adapter.name for adapter in self.live})
            raise NotFound(f"there is no adapter {name!r}; there are {known}", {"adapters": known})
        left = tuple(adapter for adapter in self.live if adapter.name != name)
        try:
            with self._needing(f"the list of adapters without {name}, which is not removed,", 1 << 10):
                await asyncio.to_thread(self._set, left)
        except OSError as error:
            raise not_written(f"adapter {name} was not removed", error, "send the call again") from error
        await self._fleet.follow_adapters()
        await self._remove_unused()

    async def all(self) -> list[AdapterStatus]:
        """Return the committed versions, oldest first."""
        return [self._status(adapter) for adapter in self.live]

    async def file(self, adapter: AdapterVersion, file: str, offset: int) -> bytes:
        """Return up to ``ADAPTER_PART_BYTES`` of a file, for a node without the log. Raises NotFound,
        InvalidRequest."""
        if file not in ADAPTER_FILES:
            raise InvalidRequest(f"an adapter has no file {file!r}")

        def read() -> bytes:
            with (self._store.folder(adapter) / file).open("rb") as stream:
                stream.seek(offset)
                return stream.read(ADAPTER_PART_BYTES)

        try:
            return await asyncio.to_thread(read)
        except FileNotFoundError as error:
            raise NotFound(f"adapter {adapter} is not in the log any more") from error

    @exclusive
    async def _commit(self, name: str, request: CommitAdapter) -> AdapterVersion:
        self._fleet.require_followed()
        asked = request.base_version
        head = self._log.head()
        assert head is not None, "the ingest has created version 0"
        if asked is not None and self._labels.number_of(asked) != head.version:
            raise VersionConflict(
                f"the adapter belongs to weight version {asked}, and version {head.version} is served: push that "
                "base again, or train on this one",
                {"base_version": asked, "latest_version": head.version},
            )
        if (newest := self._newest_if_same(name, request, request.digest)) is not None:
            return newest  # the answer to an earlier commit was lost
        try:
            adapter = await asyncio.to_thread(self._check_and_take_in, name, request, head)
        except OSError as error:
            raise not_written(f"adapter {name} was not committed", error, "push it again") from error
        await self._fleet.follow_adapters()
        return adapter

    def _newest_if_same(self, name: str, request: CommitAdapter, digest: str | None) -> AdapterVersion | None:
        """Return the newest version, if it has these files or is this rollback, and is the requested version."""
        newest = self.newest(name)
        if newest is None or request.version not in (NEXT, newest.version):
            return None
        # after this rollback, the older version may have been removed
        is_rollback = request.rollback_to is not None and request.rollback_to == newest.rollback_of
        return newest if is_rollback or newest.digest == digest else None

    @exclusive
    async def _sweep(self) -> None:
        await self._remove_unused()

    async def _remove_unused(self) -> None:
        """Remove the files of versions that are neither committed nor held by a replica. The caller writes alone."""
        held = {each.digest for status in self._fleet.table.live() for each in status.adapters}
        if self._fleet.table.is_complete():
            await asyncio.to_thread(self._store.sweep, self.live, held)

    def _status(self, adapter: AdapterVersion) -> AdapterStatus:
        reports = self._fleet.table.adapter(adapter)
        return AdapterStatus(
            **adapter.model_dump(),
            replicas=tuple(name for name, held in reports.items() if held is not None and held.error is None),
            errors={name: held.error for name, held in reports.items() if held is not None and held.error is not None},
            running=sum(held.running for held in reports.values() if held is not None),
        )

    def _begin(self, name: str, begin: BeginAdapter) -> AdapterUpload:
        self._require_room(name)
        self._check_size(name, begin.config, begin.nbytes)
        config = json.dumps(begin.config, indent=1, sort_keys=True).encode()
        digest = adapter_digest(config, begin.digest)
        if (newest := self.newest(name)) is not None and newest.digest == digest:
            return AdapterUpload(digest=digest, missing=())
        self._forget_removed()
        key = name, digest
        with self._needing(f"adapter {name}", begin.nbytes):
            if key not in self._uploads:
                while len(self._uploads) >= max(MIN_UPLOADS, 2 * self._limits.max_live):
                    idle = min(self._uploads, key=lambda key: self._uploads[key].touched_at)
                    shutil.rmtree(self._uploads.pop(idle).folder, ignore_errors=True)
                self._uploads[key] = _Upload(self._store.staging(f"{name}-{digest}"), config, begin)
            upload = self._uploads[key]
            if begin.nonce is None:
                return AdapterUpload(digest=digest, missing=upload.missing)
            (upload.folder / begin.nonce).touch()
        return AdapterUpload(digest=digest, missing=upload.missing, folder=str(upload.folder))

    def _check_size(self, name: str, config: Mapping[str, object], nbytes: int) -> None:
        """Check PEFT's configuration, and the size of the tensors' file. Raises InvalidManifest."""
        rank = check_config(config, self._limits.max_rank)
        # each module has at most two matrices in fp32; the header takes at most 512 bytes for each
        limit = sum(4 * rank * sum(widths) + 1024 for widths in self._model.linears.values())
        if nbytes > limit:
            raise InvalidManifest(
                f"adapter {name} has {nbytes} bytes, and rank {rank} in all linear layers takes {limit}: send "
                "nothing but lora_A and lora_B",
                {"nbytes": nbytes, "limit_bytes": limit},
            )

    def _check_and_take_in(self, name: str, request: CommitAdapter, head: Head) -> AdapterVersion:
        """Check an upload, a folder, or the files of an older version completely, and commit it. Blocks.

        Raises NotFound, UploadIncomplete, DigestMismatch, InvalidManifest, InvalidRequest, VersionConflict, Forbidden,
        InsufficientStorage, LogCorrupt, OSError.
        """
        self._require_room(name)
        copy = self._store.staging("folder")
        try:
            if request.path is not None:
                files = self._files(request.path)
                self._check_size(name, read_config(files[CONFIG_FILE]), files[TENSORS_FILE].stat().st_size)
                staged = self._copy(name, files, copy)
                found = digest_of(staged)
            elif request.rollback_to is not None:
                older = self._kept_version(name, request.rollback_to)
                self._store.verify(older)
                folder = self._store.folder(older)
                staged = self._copy(name, {file: folder / file for file in ADAPTER_FILES}, copy)
                found = older.digest
            else:
                found = request.digest or ""
                if (upload := self._uploads.get((name, found))) is None:
                    raise _no_upload(name, found)
                upload.require_complete()
                staged = upload.folder
            rank = check_config(read_config(staged / CONFIG_FILE), self._limits.max_rank)
            check_tensors(staged / TENSORS_FILE, rank, self._model)
            return self._take_in(name, request, staged, found, rank, head)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
            self._forget_removed()

    def _take_in(
        self, name: str, request: CommitAdapter, staged: Path, digest: str, rank: int, head: Head
    ) -> AdapterVersion:
        """Commit a checked adapter for the weights of ``head``. The newest version is returned instead if it has the
        same files. Raises VersionConflict, InsufficientStorage, OSError."""
        if (same := self._newest_if_same(name, request, digest)) is not None:
            shutil.rmtree(staged, ignore_errors=True)
            return same
        newest = self.newest(name)
        last = -1 if newest is None else newest.version
        number = max(1, last + 1) if request.version == NEXT else int(request.version)
        if number > MAX_VERSION:
            raise VersionConflict(
                f"adapter {name} has version {last}, the last that there can be: DELETE /v1/adapters/{name}, which "
                "begins anew",
                {"newest": last, "version": number},
            )
        if number <= last:
            raise VersionConflict(
                f"adapter {name} has version {last}: push a newer one than that, and not {number}",
                {"newest": last, "version": number},
            )
        newest = AdapterVersion(
            name=name,
            version=number,
            digest=digest,
            base_version=head.version,
            base_digest=head.digest,
            rank=rank,
            nbytes=(staged / TENSORS_FILE).stat().st_size,
            label=request.label,
            rollback_of=request.rollback_to,
        )
        with self._needing(f"adapter {newest}, which is not committed,", newest.nbytes):
            self._store.take_in(newest, staged)
            self._set(self._kept((*self.live, newest)))
        logger.info("adapter %s committed: %.1f MB, digest %s", newest, newest.nbytes / 1e6, newest.digest)
        return newest

    def _set(self, versions: tuple[AdapterVersion, ...]) -> None:
        self._store.set(versions)
        self.live = versions

    def _kept(self, versions: tuple[AdapterVersion, ...]) -> tuple[AdapterVersion, ...]:
        """Return the newest version of each adapter, and older ones while replicas have room beside a spare place: a
        new version is loaded there while rollouts finish under the one that it replaces."""
        newest = {adapter.name: adapter for adapter in versions}
        num_older = max(0, self._limits.max_live - 1 - len(newest))
        older = [adapter for adapter in versions if newest[adapter.name] is not adapter]
        kept = {*newest.values(), *older[len(older) - min(len(older), num_older) :]}
        return tuple(adapter for adapter in versions if adapter in kept)

    def _require_room(self, name: str) -> None:
        max_live = self._limits.max_live
        if not max_live:
            raise InvalidRequest("adapters are not served: set engine.adapters.max_live, and restart the service")
        if self._is_of_model(name):
            raise InvalidRequest(f"{name!r} is the name of the served model: give the adapter another one")
        names = {adapter.name for adapter in self.live}
        if name not in names and len(names) >= max_live:
            raise VersionConflict(
                f"{len(names)} adapters are live, which is engine.adapters.max_live: remove one of "
                f"{', '.join(sorted(names))} with DELETE /v1/adapters/{{name}}, or raise it",
                {"adapters": sorted(names), "max_live": max_live},
            )

    def _is_of_model(self, name: str) -> bool:
        return name in (self._config.model.name, *self._config.model.aliases)

    def _kept_version(self, name: str, version: int) -> AdapterVersion:
        versions = {adapter.version: adapter for adapter in self.live if adapter.name == name}
        if version not in versions:
            raise NotFound(
                f"adapter {name} has no version {version} any more: give one of {sorted(versions)}, or push it again",
                {"versions": sorted(versions)},
            )
        return versions[version]

    def _files(self, path: str) -> dict[str, Path]:
        roots = self._config.weights.source_roots
        if not Path(path).is_absolute():
            raise InvalidRequest(f"{path!r} is a relative path, and the ingest runs elsewhere: send an absolute one")
        source = allowed_path(Path(path), roots)
        files = {file: allowed_path(source / file, roots) for file in ADAPTER_FILES}
        for file, found in files.items():
            if not found.is_file():
                raise NotFound(f"{path} has no {file} that the ingest can see: save it with PEFT's save_pretrained")
        return files

    def _copy(self, name: str, files: Mapping[str, Path], folder: Path) -> Path:
        _make_folder(folder)
        for file, source in files.items():
            with self._needing(f"adapter {name}", source.stat().st_size):
                shutil.copyfile(source, folder / file)
        return folder

    @contextmanager
    def _needing(self, what: str, nbytes: int) -> Iterator[None]:
        """Raise InsufficientStorage if the disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise no_room(what, self._log.root, nbytes) from error

    def _forget_removed(self) -> None:
        """Forget the uploads whose folders were moved or removed. They must be sent again."""
        # Path.is_dir raises ESTALE and EIO, so that one upload without an answer of the disk would fail all others
        self._uploads = {key: each for key, each in self._uploads.items() if os.path.isdir(each.folder)}


class _Upload:
    """The upload of one adapter's tensors, in parts."""

    def __init__(self, folder: Path, config: bytes, begin: BeginAdapter) -> None:
        self.folder, self._begin = folder, begin
        self.touched_at = time.monotonic()
        try:
            _make_folder(folder)
            write_synced(folder / CONFIG_FILE, config)
            with (folder / TENSORS_FILE).open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, begin.nbytes)
        except OSError:  # what a full disk has taken of it would stay until the next start
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._missing = set(range(-(-begin.nbytes // ADAPTER_PART_BYTES)))

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._missing))

    def write(self, index: int, content: bytes) -> None:
        start = index * ADAPTER_PART_BYTES
        expected = min(ADAPTER_PART_BYTES, self._begin.nbytes - start)
        if index < 0 or len(content) != expected:
            raise InvalidRequest(
                f"part {index} has {len(content)} bytes, and must have {max(0, expected)} of the file's "
                f"{self._begin.nbytes}: send the parts that POST /v1/adapters/{{name}} names"
            )
        with (self.folder / TENSORS_FILE).open("r+b") as stream:
            stream.seek(start)
            stream.write(content)
        self._missing.discard(index)
        self.touched_at = time.monotonic()

    def require_complete(self) -> None:
        """Compare the digest of the file, which a client of this host may have written itself."""
        if (found := tensors_digest(self.folder)) != self._begin.digest:
            if self._missing:
                raise UploadIncomplete(f"parts {self.missing} are missing: send them", {"missing": list(self.missing)})
            self._missing = set(range(-(-self._begin.nbytes // ADAPTER_PART_BYTES)))
            raise DigestMismatch(f"the upload hashes to {found}, not to {self._begin.digest}: send its parts again")


def _make_folder(folder: Path) -> None:
    make_private(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _no_upload(name: str, digest: str) -> NotFound:
    return NotFound(f"adapter {name} has no upload {digest}: POST /v1/adapters/{name} again, and send its parts")


def read_config(path: Path) -> dict[str, object]:
    """Read PEFT's configuration. Raises InvalidManifest, OSError."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"{CONFIG_FILE} does not parse: {error}") from error
    return config


def check_config(config: Mapping[str, object], max_rank: int) -> int:
    """Return the largest rank in PEFT's configuration. Raises InvalidManifest for what engines cannot serve."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidManifest(f"the adapter's peft_type is {kind!r}: only LORA is served")
    if unserved := [what for field, what in _REFUSED.items() if config.get(field)]:
        raise InvalidManifest(f"the adapter has {', '.join(unserved)}, which vLLM does not serve: train plain LoRA")
    if config.get("bias", "none") != "none":
        raise InvalidManifest(f"the adapter's bias is {config['bias']!r}: only none is served")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _IDLE_INITS:
        raise InvalidManifest(
            f"init_lora_weights={init} changes the base model, which the adapter alone does not tell: save it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    ranks, alphas = _with_pattern(config, "r", "rank_pattern"), _with_pattern(config, "lora_alpha", "alpha_pattern")
    if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank > 0 for rank in ranks):
        raise InvalidManifest(f"the adapter's ranks are {ranks}: give positive numbers in r and rank_pattern")
    if not all(type(alpha) in (int, float) and abs(alpha) <= _MAX_ALPHA for alpha in alphas):
        raise InvalidManifest(f"the adapter's alphas are {alphas}: give numbers in lora_alpha and alpha_pattern")
    rank = max(rank for rank in ranks if isinstance(rank, int))
    if rank > max_rank:
        raise InvalidManifest(
            f"the adapter has rank {rank}, and engine.adapters.max_rank is {max_rank}: raise it, or train a smaller "
            "one",
            {"rank": rank, "max_rank": max_rank},
        )
    return rank


def _with_pattern(config: Mapping[str, object], field: str, pattern: str) -> list[Any]:
    """Return the value of a field in PEFT's configuration, and those for single modules."""
    of_modules = config.get(pattern) or {}
    return [config.get(field), *(of_modules.values() if isinstance(of_modules, dict) else ())]


def check_tensors(path: Path, rank: int, model: ServedModel) -> None:
    """Compare an adapter's tensors with the served model's linear layers. Raises InvalidManifest."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in SourceFile(path).tensors.items():
        if tensor.dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidManifest(f"{name} is {tensor.dtype}: send float32, bfloat16 or float16")
        if (found := _WEIGHT.fullmatch(name)) is None:
            raise InvalidManifest(f"{name} is neither lora_A nor lora_B of a linear layer: nothing else is served")
        shapes.setdefault(found[1], {})[found[2]] = tensor.shape
    if not shapes:
        raise InvalidManifest("the adapter has no tensors")
    for module, pair in shapes.items():
        _check_module(module, pair, rank, model)
    with safe_open(path, framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118 - it is no dict
            if not _is_finite(reader.get_tensor(name)):
                raise InvalidManifest(f"{name} has values that are not finite: the training has diverged")


def _is_finite(tensor: torch.Tensor) -> bool:
    # a sum takes an eighth of the time of isfinite; a sum of finite values may overflow
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(torch.isfinite(tensor).all())


def _check_module(module: str, pair: dict[str, tuple[int, ...]], rank: int, model: ServedModel) -> None:
    if module not in model.linears or ".experts." in module:
        why = "a routed expert, whose adapters are not served" if ".experts" in module else "no linear layer here"
        raise InvalidManifest(f"the adapter targets {module}, which is {why}: leave it out of target_modules")
    if pair.keys() != {"A", "B"}:
        raise InvalidManifest(f"{module} has lora_{next(iter(pair))} alone: send lora_A and lora_B")
    outputs, inputs = model.linears[module]
    own = pair["A"][0] if pair["A"] else 0
    if pair != {"A": (own, inputs), "B": (outputs, own)} or not 0 < own <= rank:
        raise InvalidManifest(
            f"{module} has lora_A {list(pair['A'])} and lora_B {list(pair['B'])}, and the served model takes "
            f"[r, {inputs}] and [{outputs}, r] with r up to {rank}: is the adapter of another base model?"
        )
