"""The ingest: the only process that writes the log. It connects trainers and replicas.

Its state is the log and the reports of replicas; after a restart it has both again within one poll.
"""

import asyncio
import logging
import re
import threading
from pathlib import Path

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    LogCorrupt,
    LogUnreadable,
    NotFound,
    RolloutServiceError,
    VersionConflict,
)
from rollout_service.fleet.coordinator import FleetCoordinator
from rollout_service.ingest.adapters import AdapterIngest
from rollout_service.ingest.exclusive import exclusive
from rollout_service.ingest.own_log import own_newest, recipe_of
from rollout_service.ingest.publisher import Publisher
from rollout_service.ingest.pulls import Pulls
from rollout_service.ingest.sources.delta_folder import kv_scales_of
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.ingest.sources.shared_memory import GPU_BYTES
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.ingest.uploads import Uploads
from rollout_service.ingest.weight_transfer import WeightTransfer
from rollout_service.kv_scales.coordinator import KVCacheCoordinator, VersionScales
from rollout_service.metrics.process import count_received, counted_commit
from rollout_service.metrics.state import FleetHistory
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.adapters import AdapterVersion
from rollout_service.protocol.base import MAX_VERSION, Failure, is_label
from rollout_service.protocol.fleet import LogPlace, PauseMode, Pin
from rollout_service.protocol.upload import (
    Announcement,
    BeginUpload,
    CommitUpload,
    HowToLoad,
    Listener,
    PathSource,
    RollBack,
    TrainerRecipe,
    UploadPlan,
)
from rollout_service.protocol.weight_log import Head, LogFile, Newest
from rollout_service.protocol.weights import ServiceState, TensorDigests, WeightStatus
from rollout_service.runtime.tasks import ChangeNotifier, ClosableLock, RepeatedTask, ShieldedTasks
from rollout_service.store.durable_io import DISK_FULL, WriterLock, no_room, not_written, remedy, remove_tree
from rollout_service.store.labels import VersionLabels, require_kept
from rollout_service.store.log import WeightLog, stage_again
from rollout_service.store.manifest import Manifest
from rollout_service.store.node_cache import ChunkServer
from rollout_service.store.upload_record import UploadRecord, summary_of, unconfirmed

logger = logging.getLogger(__name__)
_INTEGER = re.compile("[0-9]{1,16}")


class Ingest:
    """Receives versions, commits them, and reports the fleet's state to replicas and callers."""

    _snapshot: TensorDigests | None = None

    def __init__(self, config: ServiceConfig, place: LogPlace | None = None) -> None:
        """``place``: location of the log; None: ``weights.root``, which is not ``auto``."""
        self._config = config
        self._log = WeightLog(config.weights.root_here())
        self._changes, self._writing = ChangeNotifier(), ClosableLock()
        self._model = ServedModel.of(config.model)
        engine = config.engine
        self._plan = self._model.plan(config.quant, engine.tensor_parallel_size, engine.expert_parallel)
        self._recipe = recipe_of(config.quant, self._plan)
        self._trainer_recipe = TrainerRecipe(
            weights=config.quant.weights,
            scales=config.quant.scales,
            quantized=tuple(sorted(self._plan.quantized)),
            keep_float32=tuple(sorted(self._model.keep_float32)),
            experts=self._model.experts,
            ignored=self._model.ignored,
            kernels=config.engine_kernels,
            adapters=engine.adapters.max_live > 0,
        )
        # tensors that are read together have at most that size, mostly less
        self._converter = Converter(self._trainer_recipe, batch_bytes=GPU_BYTES)
        self._labels = VersionLabels(self._log)
        self._uploads = Uploads(
            config.weights,
            self._log,
            self._model,
            self._plan,
            self._converter,
            self._recipe,
            self._labels,
        )
        self._lock, self._chunks = WriterLock(self._log.root), ChunkServer(self._log)
        self._shielded = ShieldedTasks()
        self._history = FleetHistory(self._log, config.scaling)
        self._fleet = FleetCoordinator(
            config, self._log, self._history, self._changes, place, self._pins, lambda: self.adapter_versions
        )
        self._adapters = AdapterIngest(config, self._log, self._model, self._fleet, self._labels, self._writing)
        self._kv_scales = VersionScales(config, self._model)
        self._preparing: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self._summaries: dict[int, WeightStatus] = {}
        self.upload_address: UploadAddress | None = None
        """Address of the listener for parts; set by the code that opens the listener."""
        self.transfer = WeightTransfer(self, self._model, self._plan)
        """Weight updates that a trainer broadcasts."""
        self.pulls = Pulls(self, self._uploads.trainer_weights)
        """Versions that a trainer publishes."""
        weights = config.weights
        self.publisher = None if weights.publish is None else Publisher(self._log, weights.publish, weights.poll_s)
        """Publishes the versions for other services."""
        self.watcher = None if weights.watch is None else self.pulls.watch(weights.watch, weights.poll_s)
        """Pulls the versions of another service."""
        self._expiry_s = min(60.0, weights.staged_ttl_s / 4)
        expiry = RepeatedTask("dropping abandoned uploads", self._expire_later, 1.0)
        self._repeated = [expiry, *(task for task in (self.watcher, self.publisher) if task is not None)]
        self.kv = KVCacheCoordinator(config, self._log)
        self._add_calls()

    def _add_calls(self) -> None:
        """Make the methods of the parts methods of this object, which other processes call: see ``IngestCalls``."""
        self.take_shared, self.chunk = self._uploads.take_shared, self._chunks.chunk
        self.staged, self.committed = self._uploads.staged, self._uploads.committed
        self.set_paused, self.is_paused = self._fleet.set_paused, self._fleet.is_paused
        self.sleep, self.wake_up, self.is_sleeping = self._fleet.sleep, self._fleet.wake_up, self._fleet.is_sleeping
        self.abort_running, self.drop_kv_cache = self._fleet.abort_running, self._fleet.drop_kv_cache
        self.fleet, self.sync = self._fleet.fleet, self._fleet.sync
        self.report, self.goodbye = self._fleet.report, self._fleet.goodbye
        self.init_weight_transfer, self.shutdown_weight_transfer = self.transfer.init, self.transfer.shutdown
        self.start_weight_update, self.finish_weight_update = self.transfer.start, self.transfer.finish
        self.update_weights, self.pull_weights = self.transfer.update, self.pulls.pull_weights
        self.choose_kv_cache, self.until_awake = self.kv.choose_kv_cache, self._fleet.until_awake
        adapters = self._adapters
        self.begin_adapter, self.adapter_part, self.adapter_file = adapters.begin, adapters.part, adapters.file
        self.commit_adapter, self.remove_adapter, self.adapters = adapters.commit, adapters.remove, adapters.all

    async def start(self) -> None:
        """Check the log, recover staged versions, and create version 0 from the configured model if the log is empty.

        Raises LogLocked while another process writes the log, LogCorrupt if it belongs to another model, or
        RolloutServiceError if its folder cannot be used.
        """
        try:
            await asyncio.to_thread(self._lock.acquire, self._config.weights.lock_wait_s)
            await self._start()
        except BaseException as error:
            await self.stop()
            if not isinstance(error, OSError):
                raise
            todo = remedy(error, "check its disk")
            raise RolloutServiceError(
                f"the log at {self._log.root} cannot be used: {error}; {todo}, or name another weights.root"
            ) from error
        self._preparing = asyncio.create_task(self._prepare_memory())
        for task in self._repeated:
            task.begin()

    async def stop(self) -> None:
        """Release the log; staged versions stay on disk. A started commit is finished first.

        Callers that still wait or write get NotReady. May be called again.
        """
        self._stopped.set()
        if self._preparing is not None:
            self._preparing.cancel()
        for task in self._repeated:
            task.end()
        await self.transfer.stop()
        for writing in (self._writing, self._fleet, self.kv):
            await writing.close()
        await self.pulls.settled()
        await self._changes.end()
        await self._uploads.close()
        self._lock.release()

    def check_tasks(self) -> None:
        """Raise RolloutServiceError if a background task has ended."""
        for task in self._repeated:
            task.check()

    async def _start(self) -> None:
        await asyncio.to_thread(self._uploads.resources.open)
        newest = own_newest(self._log, self._model, self._recipe, self._config)
        self._fleet.start()
        if newest is None:
            logger.info("the log at %s is empty: version 0 is made from %s", self._log.root, self._config.model.path)
            path = self._config.model.path
            folder = await asyncio.to_thread(FolderSource, path, ignored=self._model.ignored)
            await self._uploads.stage(BeginUpload(version=0, source=PathSource(path=path)), folder)
            await self._commit(0, CommitUpload())
            return
        head, manifest = newest
        logger.info(
            "the log at %s is continued at version %d: the weights in %s are not read again",
            self._log.root,
            head.version,
            self._config.model.path,
        )
        await asyncio.to_thread(self._adapters.open, head)
        self._log.kv_cache()  # damage is found now, and not by the next replica
        self._kv_scales.committed(manifest)
        await asyncio.to_thread(self._labels.load)
        await asyncio.to_thread(self._log.remove_uncommitted)
        await self._uploads.recover()
        self._fleet.follow_log()

    # --- trainers

    async def recipe(self) -> TrainerRecipe:
        """Return how each tensor of a version is stored, and how engines compute. Raises LogCorrupt."""
        wanted = self._config.kv_cache.dtype
        choice = await asyncio.to_thread(self._log.kv_cache) if wanted == "auto" else None
        kv_cache = choice.dtype if choice is not None else None if wanted == "auto" else wanted
        return self._trainer_recipe.model_copy(update={"kv_cache": kv_cache})

    async def begin(self, begin: Announcement, reached: str | None = None) -> UploadPlan:
        """Start or resume the upload of a version, or report that it is committed; see ``protocol/upload.py``.

        ``reached``: the service address that the trainer called, if known. Raises VersionConflict, InvalidManifest,
        InsufficientStorage, Forbidden or NotFound.
        """
        plan = await self._shielded.run(self._begin(begin))
        direct = self.upload_address and self.upload_address.announced(plan.version, reached)
        if not direct:
            return plan
        told = {"upload_url": direct.url, "upload_key": direct.key, "upload_certificate": direct.certificate}
        return plan.model_copy(update=told)

    async def listener(self, version: int, node_id: str | None) -> Listener:
        """Return the address to which a gateway on that node forwards parts. Raises RolloutServiceError."""
        assert self.upload_address is not None, "asked before there is a listener"
        return self.upload_address.within(version, node_id)

    async def _begin(self, begin: Announcement) -> UploadPlan:
        self._kv_scales.check(begin.kv_scales)
        if isinstance(begin.source, PathSource):
            await self.pulls.settled()  # as in _begin_folder
        async with self._writing:
            self._fleet.require_followed()
            if begin.version not in self._log.versions():
                self._adapters.require_none()
            return await self._uploads.begin(begin)

    async def push_folder(
        self, path: Path, request: CommitUpload, number: int | None = None, label: str | None = None
    ) -> WeightStatus:
        """Commit the contents of a folder as the next version; see ``Uploads.begin_folder``. The whole folder is read
        when it returns.

        Repeating the call joins the running upload, or gets the same answer. Raises the errors of ``begin_folder`` and
        ``commit``.
        """
        folder = await asyncio.to_thread(self.pulls.weights.named, path)
        plan = await self.begin_folder(folder, number, label, pulled=folder != path)
        return await self.commit(plan.version, request.model_copy(update={"upload_digest": plan.upload_digest}))

    async def begin_folder(
        self, path: Path, number: int | None, label: str | None, *, pulled: bool, once: bool = False
    ) -> UploadPlan:
        """Stage the contents of a folder; see ``Uploads.begin_folder``."""
        return await self._shielded.run(self._begin_folder(path, number, label, pulled=pulled, once=once))

    async def _begin_folder(
        self, path: Path, number: int | None, label: str | None, *, pulled: bool, once: bool
    ) -> UploadPlan:
        await self.pulls.settled()  # it may be a delta of the version that is being kept
        async with self._writing:
            self._fleet.require_followed()
            kv_scales = await asyncio.to_thread(kv_scales_of, path) if pulled else None
            self._kv_scales.check(kv_scales)
            return await self._uploads.begin_folder(path, number, label, pulled=pulled, once=once, kv_scales=kv_scales)

    @exclusive
    async def verify(self, version: int) -> None:
        """Wait until a staged version is converted. Raises the error of the first failed conversion."""
        if version not in self._log.versions():
            await self._uploads.staged(version).finish()

    @exclusive
    async def begin_broadcast(self) -> UploadSession:
        """Stage the next version for tensors that a trainer broadcasts. Raises InsufficientStorage, LogCorrupt."""
        self._fleet.require_followed()
        return await self._uploads.begin_broadcast()

    @property
    def adapter_versions(self) -> tuple[AdapterVersion, ...]:
        """Return the adapter versions that replicas should hold, oldest first."""
        return self._adapters.live

    async def commit_broadcast(self, staged: UploadSession, label: str | None) -> WeightStatus:
        """Commit a complete broadcast, and wait until every live replica serves it.

        ``label``: the version's number, if it is an integer above the newest one. Otherwise the number is the next one,
        and a valid label becomes the version's label. Raises the errors of ``commit``, and NotFound if another upload
        has taken its number.
        """
        version = await self._number_broadcast(staged, label)
        staged.all_came()
        return await self.commit(version, CommitUpload(wait="all"), staged)

    @exclusive
    async def _number_broadcast(self, staged: UploadSession, label: str | None) -> int:
        newest = self._uploads.numbers.newest
        if not staged.in_log and label is not None:
            self._uploads.require_staged(staged)
            wanted = int(label) if _INTEGER.fullmatch(label) else -1
            if newest < wanted <= MAX_VERSION:
                await self._uploads.renumber(staged, wanted)
            elif is_label(label):
                await self._uploads.rename(staged, label=label)
            else:
                logger.info(
                    "the weight version %r is neither an integer above %d nor a label: it is version %d here",
                    label, newest, staged.begin.version,
                )  # fmt: skip
        return staged.begin.version

    @exclusive
    async def drop_broadcast(self, staged: UploadSession) -> None:
        """Drop a broadcast, if it is still staged."""
        await self._uploads.drop(staged)

    async def commit(self, version: int, request: CommitUpload, meant: UploadSession | None = None) -> WeightStatus:
        """Make a staged version the newest; repeating the commit gets the same answer.

        ``meant``: the only upload that may be committed; None: any that ``request`` allows.

        Raises NotFound, UploadIncomplete, VersionConflict, QuantizationError, or CommitTimeout; LogCorrupt if replicas
        follow another log, or this one was replaced.
        """
        committed = await self._shielded.run(self._commit(version, request, meant))
        await self._waited(version, request)
        await self.pulls.released()
        return await self._now(committed, request)

    async def _waited(self, version: int, request: HowToLoad) -> None:
        if request.wait == "all":
            await self.wait_live(version, request.timeout_s)

    async def _now(self, committed: WeightStatus, request: HowToLoad) -> WeightStatus:
        """Return the present status of a version; what is known of it if newer ones have taken its place meanwhile."""
        try:
            return await self.status(committed.version)
        except NotFound:
            return committed.model_copy(update={"state": "live"}) if request.wait == "all" else committed

    async def roll_back(self, request: RollBack) -> WeightStatus:
        """Make a kept version the newest again, under a new number. If the newest version already has these weights, it
        is returned unchanged, so repeating the call has no effect.

        Raises NotFound, with the kept versions, for one that is not on disk; LogCorrupt, InsufficientStorage,
        RolloutServiceError or CommitTimeout.
        """
        committed = await self._shielded.run(self._roll_back(request))
        await self._waited(committed.version, request)
        return await self._now(committed, request)

    async def version_of(self, label: str) -> int:
        """Return the newest version that has a label. Raises NotFound, with the newest labels."""
        return self._labels.number_of(label)

    async def wait_live(self, version: int, timeout_s: float) -> None:
        """Return once every live replica serves ``version`` or newer. Raises CommitTimeout with their table.

        It does not wait for starting replicas: they take no request before they have the newest version.
        """
        digest = (await self._summary(version)).digest if version in self._log.versions() else None
        await self._fleet.wait_served(version, digest, timeout_s)

    @exclusive
    async def discard(self, version: int) -> None:
        """Drop a staged version. Raises VersionConflict for a committed one, NotFound."""
        if version in self._log.versions():
            raise VersionConflict(
                f"version {version} is committed; a commit is final: push a newer version, or roll back"
            )
        await self._uploads.discard(version)

    async def status(self, version: int) -> WeightStatus:
        """Return the status of ``version``. Raises NotFound; LogCorrupt or LogUnreadable for a version that cannot be
        read."""
        if version in self._uploads.staged_versions:
            return self._uploads.staged(version).status()
        why = self._uploads.why_dropped(version)
        if why is not None and version not in self._log.versions():
            raise NotFound(f"version {version} is neither committed nor staged any more: {why}", {"version": version})
        summary = await self._summary(version)
        changing = {
            "state": "live" if self._fleet.table.all_serve(version, summary.digest) else "committed",
            "error": unconfirmed(self._log.unconfirmed.get(version)),
            "replicas": self._fleet.table.live(),
        }
        return summary.model_copy(update=changing)

    async def versions(self) -> list[WeightStatus]:
        """Return all staged and committed versions, oldest first. One that cannot be read has an ``error``."""
        known = {*self._log.versions(), *self._uploads.staged_versions}
        found = []
        for version in sorted(known):
            try:
                found.append(await self.status(version))
            except NotFound:  # a version may be dropped while another is read
                continue
            except (LogCorrupt, LogUnreadable) as error:
                failure = Failure(type=type(error).__name__, message=error.message)
                found.append(WeightStatus(version=version, state="committed", error=failure))
        return found

    async def tensor_digests(self) -> TensorDigests:
        """Return the tensor digests of the newest version, as stored. Raises NotReady before version 0 exists."""
        version = (await self.fleet()).latest_version
        manifest = await asyncio.to_thread(self._log.manifest, version)
        return TensorDigests(version=version, digests={tensor.name: tensor.digest for tensor in manifest.tensors})

    async def snapshot(self, taken: TensorDigests | None = None) -> TensorDigests | None:
        """Keep digests for a later comparison; None: return those that are kept."""
        self._snapshot = taken or self._snapshot
        return self._snapshot

    # --- operators

    async def state(self) -> ServiceState:
        """Return the state for ``GET /metrics``. Raises NotReady before version 0 exists."""
        self._fleet.observe()
        fleet, versions = await self.fleet(), tuple(await self.versions())
        return await self._history.state(fleet, versions)

    # --- replicas

    async def newest(self) -> Newest:
        """Return the newest version and the identity of its log. Raises NotReady before version 0 exists."""
        return await asyncio.to_thread(self._chunks.newest)

    async def pinned(self, group: str) -> Head | None:
        """Return the version of a group in ``scaling.groups``; None: the log does not have it."""
        version = self._pins()[group].version
        if version is None:
            return None
        summary = await self._summary(version)
        newest = self._log.head()
        assert summary.digest is not None and newest is not None, "it is committed"
        # of the newest version: the group may move past a rollback that it never served
        return Head(version=version, digest=summary.digest, label=summary.label, rolled_back_at=newest.rolled_back_at)

    async def files(self, version: int) -> tuple[LogFile, ...]:
        """Return the files of a committed version, for a node without the log. Raises NotFound."""
        return await asyncio.to_thread(self._chunks.files, version)

    # --- inside

    async def _summary(self, version: int) -> WeightStatus:
        """Return the summary of a committed version. It is parsed once, in a thread: a mixture of experts has 40 000
        entries. Raises NotFound, LogCorrupt or LogUnreadable."""
        if version not in self._summaries:
            try:
                manifest = await asyncio.to_thread(self._log.manifest, version)
            except (LogCorrupt, LogUnreadable) as error:
                why = f"version {version} cannot be read: {error}; check the disk of the log"
                raise type(error)(why, {"version": version}) from error
            record = await self._uploads.committed_if_readable(version)
            self._summaries[version] = summary_of(manifest, manifest.digest, record)
        return self._summaries[version]

    def _pins(self) -> dict[str, Pin]:
        groups = self._config.scaling.groups
        versions = self._log.versions() if groups else []
        found = {}
        for name, group in groups.items():
            number = self._labels.find(group.version)
            found[name] = Pin(pinned_to=group.version, version=number if number in versions else None)
        return found

    @counted_commit
    async def _commit(self, version: int, request: CommitUpload, meant: UploadSession | None = None) -> WeightStatus:
        async with self._writing:
            self._fleet.require_followed()
            if version in self._log.versions() and (meant is None or meant.in_log):
                if (record := await self._uploads.committed(version)) is not None:
                    record.require_meant(request.upload_digest)
                return await self._summary(version)
            self._uploads.require_newer(version)
            staged = self._uploads.staged(version)
            if meant is not None:
                self._uploads.require_staged(meant)
            tensors = await staged.finish(request.upload_digest)
            bare = Manifest(
                version=version,
                fingerprint=self._model.fingerprint,
                recipe=self._recipe,
                tensors=tensors,
                label=staged.begin.label,
            )
            manifest = self._kv_scales.with_scales(bare, staged.begin.kv_scales)
            record = staged.complete_record().model_copy(update={"timings": staged.timings})
            committed = await self._append(manifest, record, request.mode)
            count_received(staged.begin.transport, staged.received_bytes, manifest.total_bytes, staged.timings)
            await self._uploads.committed_now(version)
            await self._remove_old()
        if isinstance(source := staged.begin.source, PathSource):  # while replicas load the version
            self.pulls.begin_settling(source.path)
        return committed

    @counted_commit
    async def _roll_back(self, request: RollBack) -> WeightStatus:
        """Return the summary of the version that now has these weights."""
        async with self._writing:
            self._fleet.require_followed()
            to, newest = self._labels.number_of(request.to), await self._summary(self._log.versions()[-1])
            # the call may be repeated after a lost answer, when the older version was already removed
            if to in (newest.version, newest.rollback_of):
                return newest
            require_kept(self._log.versions(), to, self._labels)
            source = await asyncio.to_thread(self._log.manifest, to)
            if source.digest == newest.digest:
                return newest
            record = await self._uploads.committed(to)
            number = self._uploads.numbers.first_free(self._uploads.staged_versions)
            try:
                manifest = await asyncio.to_thread(stage_again, self._log, source, number)
            except OSError as error:
                what = f"version {to} cannot be made the newest again"
                raise not_written(what, error, "send the call again") from error
            version = manifest.version
            if record is not None:
                record = record.model_copy(update={"begin": record.begin.numbered(version)})
            try:
                committed = await self._append(manifest, record, request.mode)
            except RolloutServiceError:
                await asyncio.to_thread(remove_tree, self._log.staging(version))
                raise
            logger.info("version %d is version %d again", version, to)
            await self._uploads.overtaken_by(version)
            await self._remove_old()
            return committed

    async def _append(self, manifest: Manifest, record: UploadRecord | None, mode: PauseMode) -> WeightStatus:
        self._adapters.require_none()
        try:
            head = await asyncio.to_thread(self._log.commit, manifest, mode, record)
        except OSError as error:
            if error.errno in DISK_FULL:
                what = f"the manifest of version {manifest.version}, which is not committed,"
                raise no_room(what, self._log.root, 2 * len(manifest.to_json())) from error
            raise not_written(f"version {manifest.version} was not committed", error, "commit it again") from error
        await asyncio.to_thread(self._labels.note, manifest.version, manifest.label)
        self._kv_scales.committed(manifest)
        summary = self._summaries[head.version] = summary_of(manifest, head.digest, record)
        logger.info(
            "version %d committed: %.1f MB, digest %s, KV scales: %s",
            head.version, manifest.total_bytes / 1e6, head.digest, manifest.kv_scales_from,
            extra={"weight_version": head.version},
        )  # fmt: skip
        self._fleet.follow(head)
        if self.publisher is not None:
            self.publisher.committed()
        await self._changes.notify()
        return summary

    async def _remove_old(self) -> None:
        """Drop the versions that no replica and no staged delta needs. Logs errors: the commit itself has succeeded."""
        try:
            if self._fleet.table.is_complete():
                await self._remove_unneeded()
        except (LogCorrupt, LogUnreadable) as error:
            logger.warning("no version is removed now, and the next commit tries again: %s", error)

    async def _remove_unneeded(self) -> None:
        """Do the same. Raises LogCorrupt, LogUnreadable."""
        versions = self._log.versions()
        pinned = {pin.version for pin in self._pins().values()}
        in_use = self._fleet.table.in_use() | self._uploads.needed | pinned
        if self.publisher is not None:
            in_use |= self.publisher.needed
        kept = set(versions)
        # a starting replica reads the newest version, or the one before if a commit has just overtaken it
        for version in versions[: -max(2, self._config.weights.keep_versions)]:
            if version not in in_use:
                try:
                    await asyncio.to_thread(self._drop, version)
                except OSError as error:
                    logger.warning("version %d is not needed any more and cannot be removed yet: %s", version, error)
                else:
                    kept.discard(version)
        for version in self._summaries.keys() - kept:
            del self._summaries[version]

    def _drop(self, version: int) -> None:
        memory = self._uploads.resources.memory
        self._log.drop(version, None if memory is None else memory.spare)
        self._uploads.resources.unmap_removed()

    async def _expire_later(self) -> None:
        await asyncio.sleep(self._expiry_s)
        await self._expire()

    @exclusive
    async def _expire(self) -> None:
        await self._uploads.expire()

    async def _prepare_memory(self) -> None:
        try:
            await asyncio.to_thread(self._uploads.resources.prepare_memory, self._stopped.is_set)
        except OSError as error:
            logger.warning("the first pushes take longer, since no memory is prepared for them: %s", error)
        except Exception:  # such as the GPU's compiler raises: pushes do without
            logger.exception("the first pushes take longer, since no memory is prepared for them")
