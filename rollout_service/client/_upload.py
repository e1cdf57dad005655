"""Send one weight version in parts. ``rollout_service.protocol.upload`` describes the messages."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import ValidationError

from rollout_service.client._control import ControlCalls
from rollout_service.client._http import Http, http_timeout, parse
from rollout_service.client._part_sender import DirectListeners, PartSender
from rollout_service.client._parts import Part, bytes_of_each, cut_parts
from rollout_service.client._retry import Repeat
from rollout_service.client._shared_memory import GpuMemory, HostMemory, SharedMemoryPushes
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, every_rank_gathers
from rollout_service.errors import (
    CommitTimeout,
    InvalidRequest,
    QuantizationError,
    TableUnknown,
)
from rollout_service.protocol.base import NewVersion
from rollout_service.protocol.upload import (
    Announcement,
    CommitUpload,
    HowToLoad,
    RollBack,
    TrainerRecipe,
    UploadPlan,
    UploadTensor,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.tls import PinnedCertificates

if TYPE_CHECKING:
    import torch

    from rollout_service.kv_scales import KVScales
    from rollout_service.model.convert import Converter

logger = logging.getLogger("rollout_service.client")

COMMIT_GRACE_S = 120.0
"""Extra seconds for a commit, which converts and syncs the rest before it starts to wait for replicas."""

Quantize = Literal["service", "trainer"]
Transport = Literal["auto", "http", "shared_memory", "cuda_ipc", "delta"]
Shared = Literal["shared_memory", "cuda_ipc"]
"""Transports through shared memory."""
Cut = Callable[[int, "list[torch.Tensor]"], Iterator[Part]]
"""Cuts a stream into parts of the given size in bytes. The list is the argument ``free`` of ``cut_parts``."""


def named_scales(kv_scales: KVScales | None) -> dict[str, float] | None:
    """Return KV scales in the form of ``Announcement.kv_scales``."""
    return None if kv_scales is None else kv_scales.named()


def announcement(version: NewVersion, **what: object) -> Announcement:
    """Return the announcement of one push, with a new uploader id. Raises InvalidRequest for an invalid version or
    label."""
    try:
        return Announcement.model_validate({"version": version, "uploader": uuid.uuid4().hex, **what})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:4]]
        raise InvalidRequest(f"version={version!r}, label={what.get('label')!r}: {'; '.join(problems)}") from error


class Uploader:
    """Announces, uploads and commits weight versions over the control connections of one client."""

    def __init__(self, http: Http, direct: Http, pinned: PinnedCertificates, *, plain: bool) -> None:
        """Create the uploader.

        Args:
            http: the service's control connections.
            direct: connections without a token, which trust the certificates of ``pinned``.
            pinned: the certificates of the ingest.
            plain: True to send parts to the ingest over ``PlainConnections``. False: over ``direct``.
        """
        self._http, self._listeners = http, DirectListeners(http, direct, pinned, plain=plain)
        self._kept: _KeptTable | None = None
        self._quantizes: _Quantizes | None = None
        self._shared: dict[Shared, SharedMemoryPushes] = {
            "cuda_ipc": SharedMemoryPushes(http, self.begin, self._listeners.find, GpuMemory),
            "shared_memory": SharedMemoryPushes(http, self.begin, self._listeners.find, HostMemory),
        }
        """The kinds of shared memory, in the order that ``auto`` tries them. For GPU tensors, CUDA IPC took 0.7 of the
        time of host memory (``benchmarks/results/h200/update_live.json``). It takes 1.5 GiB or more of the trainer's
        GPU, and is skipped if that is not free."""

    def close(self) -> None:
        """Release the memory that is kept for the next push."""
        for pushes in self._shared.values():
            pushes.close()

    def may_share(self, source: TensorSource) -> bool:
        """Return True if these tensors would use shared memory, as far as it is known."""
        return bool(self._ways_of(source, "auto", source.table))

    def _ways_of(self, source: TensorSource, transport: Transport, table: tuple[UploadTensor, ...]) -> list[Shared]:
        """Return the kinds of shared memory to try, in order."""
        if transport == "cuda_ipc" or transport == "shared_memory":
            return [transport]
        if transport != "auto":
            return []
        return [
            kind
            for kind, pushes in self._shared.items()
            if pushes.is_worth_trying(table) and (kind != "cuda_ipc" or source.gpu is not None)
        ]

    async def begin(self, begin: Announcement) -> UploadPlan:
        """Announce a version. Raises InvalidManifest, VersionConflict."""
        kept, tensors = self._kept, begin.announced_tensors
        if kept is not None and kept.tensors == tensors:
            try:
                return await self._announce(begin.by_table(kept.name))
            except TableUnknown as reason:
                logger.debug("the table of tensors is sent again: %s", reason)
        plan = await self._announce(begin)
        self._kept = None if plan.table is None else _KeptTable(tensors, plan.table)
        return plan

    async def _announce(self, begin: Announcement) -> UploadPlan:
        body = begin.model_dump(mode="json", exclude_defaults=True)
        return parse(UploadPlan, await self._http.send("POST", "/v1/weights", json=body, repeat=Repeat.IDEMPOTENT))

    async def quantizing(
        self, table: tuple[UploadTensor, ...], thread: TensorThread, batch_bytes: int | None = None
    ) -> tuple[Converter, tuple[UploadTensor, ...]]:
        """Return a converter that quantizes as the service would, and the table of its results.

        ``batch_bytes``: see ``Converter``. None: the converter's default.
        """
        recipe = await ControlCalls(self._http).recipe()
        known = self._quantizes
        if known is None or (known.recipe, known.table, known.batch_bytes) != (recipe, table, batch_bytes):
            known = self._quantizes = await thread.call(_Quantizes.of, recipe, table, batch_bytes)
        return known.converter, known.stored

    async def commit(self, version: int, commit: CommitUpload) -> WeightStatus:
        """Make a version the newest. Raises UploadIncomplete, QuantizationError, CommitTimeout."""
        route, what = f"/v1/weights/{version}/commit", f"the commit of version {version}"
        return await self._awaited(route, commit, what, f"GET /v1/weights/{version} tells whether it is committed")

    async def roll_back(self, request: RollBack) -> WeightStatus:
        """Make a kept version the newest again. Raises NotFound, CommitTimeout."""
        route, what = "/v1/weights/rollback", f"the rollback to {request.to}"
        return await self._awaited(route, request, what, "the same call again does no harm")

    async def _awaited(self, route: str, body: HowToLoad, what: str, instead: str) -> WeightStatus:
        limit_s = body.timeout_s + COMMIT_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.send(
                    "POST",
                    route,
                    json=body.model_dump(mode="json"),
                    repeat=Repeat.IDEMPOTENT,
                    timeout=http_timeout(None),
                )
        except TimeoutError:
            raise CommitTimeout(f"the service has not answered {what} within {limit_s:g} s: {instead}") from None
        return parse(WeightStatus, response)

    async def send_tensors(
        self,
        version: NewVersion,
        source: TensorSource,
        thread: TensorThread,
        *,
        label: str | None,
        quantize: Quantize,
        transport: Transport,
        kv_scales: dict[str, float] | None,
        parallel_parts: int,
        progress: Progress | None,
    ) -> tuple[int, str]:
        """Announce a version and upload its missing parts. Returns the version number and the digest of the whole
        upload.

        Raises VersionConflict, InvalidManifest, NotShared if shared memory is required, or QuantizationError for
        weights that the trainer must quantize.
        """
        async with every_rank_gathers(source, thread) as gathering:
            table, by_trainer = source.table, quantize == "trainer"
            stored = gathering.begin(own_memory=by_trainer)
            if by_trainer:
                converter, table = await self.quantizing(table, thread)
            ways = self._ways_of(source, transport, table)
            for kind in ways:
                checks: DeferredChecks | None = None
                if by_trainer:
                    from rollout_service.quant.deferred_checks import DeferredChecks  # imports torch

                    # host memory takes codes from the CPU; GPU memory and parts take them from any device
                    to_cpu = kind == "shared_memory"
                    checks = None if to_cpu else DeferredChecks()  # a copy to the CPU synchronizes anyhow
                    stored = converter.convert(gathering.tensors, to_cpu=to_cpu, checks=checks)
                try:
                    sent = await self._shared[kind].push(
                        partial(announcement, version, kv_scales=kv_scales, label=label),
                        table,
                        stored,
                        thread,
                        progress,
                        otherwise=transport == "auto",
                        again=transport == "auto" and source.can_be_read_again,
                        checks=checks,
                    )
                except QuantizationError as error:
                    raise staged_still(version, error) from error
                if sent is not None:
                    return sent
                stored = gathering.begin(own_memory=by_trainer)
                if self._shared[kind].reached:  # the service dropped the batches it had; parts are kept, so send those
                    break
            if by_trainer:
                stored = converter.convert(gathering.tensors, to_cpu=False)
            announced = announcement(version, tensors=table, kv_scales=kv_scales, label=label)
            cut = partial(cut_parts, bytes_of_each(stored), held=source.held)
            return await self.send_stream(announced, cut, thread, parallel_parts=parallel_parts, progress=progress)

    async def send_stream(
        self,
        announced: Announcement,
        cut: Cut,
        thread: TensorThread,
        *,
        parallel_parts: int,
        progress: Progress | None,
    ) -> tuple[int, str]:
        """Announce a version and upload the missing parts of its stream. Returns and raises as ``send_tensors``.

        Args:
            announced: the announcement.
            cut: makes the parts, in any order.
            thread: the thread that iterates over the parts.
            parallel_parts: maximum number of concurrent uploads.
            progress: see ``RolloutClient.push_weights``.
        """
        version = announced.version
        try:
            sender = await self.open(announced, progress)
            version = sender.version
            parts = _made_in(thread, cut(sender.part_bytes, sender.free))
            return version, await sender.send(parts, parallel_parts)
        except QuantizationError as error:
            raise staged_still(version, error) from error

    async def open(self, announced: Announcement, progress: Progress | None) -> PartSender:
        """Announce a version and return the sender of its parts. Raises InvalidManifest, VersionConflict,
        DeltaBaseGone."""
        plan = await self.begin(announced)
        return PartSender(
            self._http, await self._listeners.find(plan), announced.numbered(plan.version), plan, progress
        )


async def _made_in(thread: TensorThread, parts: Iterator[Part]) -> AsyncIterator[Part]:
    """Yield each part when it is requested, made in ``thread``."""
    while (part := await thread.call(next, parts, None)) is not None:
        yield part


def staged_still(version: NewVersion, error: QuantizationError) -> QuantizationError:
    """Return the error of a version that stays staged in part, with its remedies."""
    return QuantizationError(
        f"{error.message}. Version {version} stays staged with the parts that were sent, and is not committed: "
        f"mend the weights and push it again, or discard({version})",
        error.detail,
    )


class _KeptTable(NamedTuple):
    """The last announced table, and its name at the ingest."""

    tensors: tuple[UploadTensor, ...]
    name: str


class _Quantizes(NamedTuple):
    """The converter of a trainer that quantizes, reused at every step."""

    recipe: TrainerRecipe
    table: tuple[UploadTensor, ...]
    batch_bytes: int | None
    converter: Converter
    stored: tuple[UploadTensor, ...]
    """The table of the converter's results."""

    @classmethod
    def of(cls, recipe: TrainerRecipe, table: tuple[UploadTensor, ...], batch_bytes: int | None) -> _Quantizes:
        """Create the converter. Imports torch."""
        from rollout_service.model.convert import BATCH_BYTES, Converter  # imports torch

        # CPU tensors stay on the CPU, because the trainer's GPU may have no room
        converter = Converter(recipe, device="cpu", batch_bytes=batch_bytes or BATCH_BYTES)
        return cls(recipe, table, batch_bytes, converter, tuple(converter.table(table)))
