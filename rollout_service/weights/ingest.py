"""The ingest: the one process that writes the log, and the meeting point of trainers and replicas.

Its state is the log plus what replicas report; when it restarts it has both again within one poll.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollout_service.config import ServiceConfig
from rollout_service.errors import CommitTimeout, LogCorrupt, NotFound, NotReady, RolloutServiceError, VersionConflict
from rollout_service.types import Fleet, PauseMode, ReplicaStatus, WeightStatus
from rollout_service.weights.convert import Converter
from rollout_service.weights.fleet import FleetTable, Wish
from rollout_service.weights.log import Control, WeightLog
from rollout_service.weights.manifest import Manifest, Recipe
from rollout_service.weights.served_model import ServedModel
from rollout_service.weights.sources import FolderSource, allowed_path
from rollout_service.weights.staging import StagedVersion
from rollout_service.weights.upload import BeginUpload, CommitUpload, PathSource, TrainerRecipe, UploadPlan

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Ingest:
    """Takes in versions, commits them, and tells replicas and callers where the fleet stands."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._log = WeightLog(config.weights.root)
        self._model = ServedModel.load(config.model.path)
        self._plan = self._model.plan(config.quant, config.engine.tensor_parallel_size)
        self._recipe = Recipe(
            weights=config.quant.weights, scales=config.quant.scales, not_converted=self._plan.not_converted
        )
        self._trainer_recipe = TrainerRecipe(
            weights=config.quant.weights,
            scales=config.quant.scales,
            quantized=tuple(sorted(self._plan.quantized)),
            keep_float32=tuple(sorted(self._model.keep_float32)),
            experts=self._model.experts,
        )
        self._converter = Converter(self._trainer_recipe, device=config.quant.device)
        self._wish: Wish | None = None
        self._fleet = FleetTable(config.weights.dead_after_s, may_be_empty=config.scaling.min_replicas == 0)
        self._staged: dict[int, StagedVersion] = {}
        self._writing, self._controlling = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quantize")
        self.upload_url = ""
        """Where parts are taken; set by whoever opens the listener."""

    async def start(self) -> None:
        """Check the log, and make version 0 from the configured model if it is empty."""
        head = self._log.head()
        await asyncio.to_thread(self._log.clear_staging)
        if head is None:
            logger.info("the log at %s is empty: version 0 is made from %s", self._log.root, self._config.model.path)
            source = PathSource(path=self._config.model.path)
            await self._stage(BeginUpload(version=0, source=source), FolderSource(source.path))
            await self._commit(0, "keep")
            return
        manifest = self._log.manifest(head.version)
        if manifest.fingerprint != self._model.fingerprint or manifest.recipe != self._recipe:
            raise LogCorrupt(
                f"the log at {self._log.root} holds version {head.version} of another model or quantization than "
                f"{self._config.model.path} with quant={self._config.quant.model_dump()}: name another weights.root"
            )
        self._wish = self._current_wish()

    # --- trainers

    async def recipe(self) -> TrainerRecipe:
        """What becomes of each tensor of a version."""
        return self._trainer_recipe

    async def begin(self, begin: BeginUpload) -> UploadPlan:
        """Start or resume the upload of a version; see ``weights/upload.py``.

        Raises VersionConflict, InvalidManifest, Forbidden or NotFound.
        """
        return await self._to_the_end(self._begin(begin))

    async def _begin(self, begin: BeginUpload) -> UploadPlan:
        async with self._writing:
            staged = self._staged.get(begin.version)
            if staged is not None and staged.failure() is None:
                if staged.begin != begin:
                    raise VersionConflict(
                        f"version {begin.version} is staged with another tensor table: DELETE it to begin anew",
                        {"version": begin.version},
                    )
                return self._upload_plan(staged)
            self._require_newer(begin.version)
            source = None
            if begin.source is not None:
                roots = self._config.weights.source_roots
                source = await asyncio.to_thread(FolderSource, allowed_path(begin.source.path, roots), roots)
            return self._upload_plan(await self._stage(begin, source))

    def staged(self, version: int) -> StagedVersion:
        """The upload of ``version``. Raises NotFound."""
        if version not in self._staged:
            raise NotFound(
                f"version {version} is not staged (staged: {sorted(self._staged)}): POST /v1/weights first",
                {"version": version, "staged": sorted(self._staged)},
            )
        return self._staged[version]

    async def commit(self, version: int, request: CommitUpload) -> WeightStatus:
        """Make a staged version the newest; the same commit again gets the same answer.

        Raises NotFound, UploadIncomplete, VersionConflict, QuantizationError, or CommitTimeout.
        """
        await self._to_the_end(self._commit(version, request.mode))
        if request.wait == "all":
            await self.wait_live(version, request.timeout_s)
        return self._status(version)

    async def wait_live(self, version: int, timeout_s: float) -> None:
        """Return once every live replica serves ``version`` or newer. Raises CommitTimeout with their table."""
        if not await self._wait(lambda: self._fleet.all_serve(version), timeout_s):
            raise CommitTimeout(
                f"version {version} is committed, but after {timeout_s} s not all replicas serve it; they go on trying",
                {"version": version, "replicas": [s.model_dump(mode="json") for s in self._fleet.live()]},
            )

    async def discard(self, version: int) -> None:
        """Drop a staged version. Raises VersionConflict for a committed one, NotFound."""
        await self._to_the_end(self._discard(version))

    async def status(self, version: int) -> WeightStatus:
        """Where ``version`` stands. Raises NotFound."""
        return self._status(version)

    async def versions(self) -> list[WeightStatus]:
        """All versions on disk or staged, oldest first."""
        return [self._status(version) for version in sorted({*self._log.versions(), *self._staged})]

    # --- operators

    async def set_paused(self, paused: bool, mode: PauseMode, timeout_s: float) -> None:
        """Pause or resume every replica, later ones too; returns when all live ones have, or raises NotReady."""
        await self._to_the_end(self._set_control(Control(paused=paused, mode=mode)))
        if not await self._wait(lambda: self._fleet.all_paused(paused), timeout_s):
            raise NotReady(
                f"not every replica is {'paused' if paused else 'resumed'} after {timeout_s} s; they go on trying",
                {"replicas": [status.model_dump(mode="json") for status in self._fleet.live()]},
            )

    async def is_paused(self) -> bool:
        """Whether a pause was asked for and every live replica has obeyed."""
        return self._wish is not None and self._wish.paused and self._fleet.all_paused(True)

    async def fleet(self) -> Fleet:
        """The live replicas beside the newest version."""
        if self._wish is None:
            raise NotReady("version 0 is still being made from the model's folder")
        return Fleet(latest_version=self._wish.version, paused=self._wish.paused, replicas=self._fleet.live())

    # --- replicas

    async def sync(self, status: ReplicaStatus, seen: Wish | None) -> Wish:
        """A replica's report, and its long poll: answers when the wish differs from ``seen``, or after ``poll_s``."""
        await self.report(status)
        if self._wish is None:
            raise NotReady("version 0 is still being made from the model's folder")
        await self._wait(lambda: self._wish != seen, self._config.weights.poll_s)
        return self._wish

    async def report(self, status: ReplicaStatus) -> None:
        """A replica's report alone."""
        self._fleet.report(status)
        await self._notify()

    # --- inside

    def _status(self, version: int) -> WeightStatus:
        if version in self._staged:
            staged = self._staged[version]
            missing = tuple(sorted(staged.missing))
            return WeightStatus(version=version, state="staged", total_bytes=staged.begin.nbytes, missing_parts=missing)
        manifest = self._log.manifest(version)
        return WeightStatus(
            version=version,
            state="live" if self._fleet.all_serve(version) else "committed",
            digest=manifest.digest,
            total_bytes=manifest.total_bytes,
            replicas=self._fleet.live(),
        )

    async def _stage(self, begin: BeginUpload, source: FolderSource | None) -> StagedVersion:
        self._model.check_table(begin.tensors if source is None else source.table, self._plan)
        failed = self._staged.pop(begin.version, None)
        if failed is not None:
            await failed.discard()
        staged = await asyncio.to_thread(
            StagedVersion,
            begin,
            self._log.staging(begin.version),
            self._model,
            self._converter,
            self._config.weights.part_bytes,
            self._executor,
        )
        if source is None:
            staged.expect_parts()
        else:
            staged.convert_folder(source)
        self._staged[begin.version] = staged
        return staged

    async def _commit(self, version: int, mode: PauseMode) -> None:
        async with self._writing:
            if version in self._log.versions():
                return
            self._require_newer(version)
            staged = self.staged(version)
            if (failure := staged.failure()) is not None:
                raise failure
            manifest = Manifest(
                version=version,
                fingerprint=self._model.fingerprint,
                recipe=self._recipe,
                tensors=await staged.finish(),
            )
            await self._append(manifest, mode)
            await self._remove_overtaken()

    async def _append(self, manifest: Manifest, mode: PauseMode) -> None:
        staged = self._staged[manifest.version]
        try:
            head = await asyncio.to_thread(self._log.commit, manifest, mode)
        except OSError as error:
            del self._staged[manifest.version]
            await staged.discard()
            raise RolloutServiceError(
                f"version {manifest.version} was not committed: {error}: begin it anew"
            ) from error
        del self._staged[manifest.version]
        logger.info("version %d committed: %.1f MB, digest %s", head.version, manifest.total_bytes / 1e6, head.digest)
        self._wish = self._current_wish()
        await self._notify()
        await asyncio.to_thread(staged.remove_files)

    async def _remove_overtaken(self) -> None:
        """Drop staged versions that can be committed no more, and old ones that no replica needs."""
        versions, in_use = self._log.versions(), self._fleet.in_use()
        for version in [v for v in self._staged if v < versions[-1]]:
            await self._staged.pop(version).discard()
        for version in versions[: -self._config.weights.keep_versions]:
            if version not in in_use:
                await asyncio.to_thread(self._log.drop, version)

    async def _discard(self, version: int) -> None:
        async with self._writing:
            if version in self._log.versions():
                raise VersionConflict(f"version {version} is committed; a commit is final: push a newer version")
            staged = self.staged(version)
            del self._staged[version]
            await staged.discard()

    async def _set_control(self, control: Control) -> None:
        async with self._controlling:
            await asyncio.to_thread(self._log.set_control, control)
            self._wish = self._current_wish()
            await self._notify()

    async def _to_the_end(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await ``work``, which goes on if the caller goes away: half a commit is neither staged nor committed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _require_newer(self, version: int) -> None:
        head = self._log.head()
        if head is not None and version <= head.version:
            raise VersionConflict(
                f"version {version} is not newer than the newest committed version {head.version} "
                f"(digest {head.digest}): versions only grow",
                {"version": version, "latest_version": head.version, "latest_digest": head.digest},
            )

    def _upload_plan(self, staged: StagedVersion) -> UploadPlan:
        return UploadPlan(
            version=staged.begin.version,
            state="staged",
            part_bytes=staged.part_bytes,
            num_parts=staged.num_parts,
            missing_parts=tuple(sorted(staged.missing)),
            upload_url=self.upload_url,
        )

    def _current_wish(self) -> Wish | None:
        head, control = self._log.head(), self._log.control()
        if head is None:
            return None
        return Wish(version=head.version, paused=control.paused, pause_mode=control.mode)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(reached)
            except TimeoutError:
                return reached()
        return True
