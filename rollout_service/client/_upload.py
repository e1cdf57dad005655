"""Send one weight version in parts. ``rollout_service.protocol.upload`` describes the messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from rollout_service.client._control import ControlCalls
from rollout_service.client._http import Http, Repeat, parse
from rollout_service.client._part_sender import DirectListeners, PartSender
from rollout_service.client._parts import Part, bytes_of_each, cut_parts
from rollout_service.client._push import Push, Transport, staged_still
from rollout_service.client._shared_memory import GpuMemory, HostMemory, SharedMemoryPushes
from rollout_service.client._tensors import TensorSource, TensorThread, every_rank_gathers
from rollout_service.errors import QuantizationError
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

    from rollout_service.model.convert import Converter


Shared = Literal["shared_memory", "cuda_ipc"]
"""Transports through shared memory."""


class Uploader:
    """Announces, uploads and commits weight versions over the control connections of one client."""

    def __init__(self, http: Http, direct: Http, pinned: PinnedCertificates, *, plain: bool) -> None:
        """Create the uploader over the service's control connections. See ``DirectListeners`` for the rest."""
        self._http, self._listeners = http, DirectListeners(http, direct, pinned, plain=plain)
        self._quantizing: tuple[object, Converter, tuple[UploadTensor, ...]] | None = None
        """The arguments of the last converter, the converter, and the table of its results."""
        self._shared: dict[Shared, SharedMemoryPushes] = {
            "cuda_ipc": SharedMemoryPushes(http, self.begin, self._listeners.find, GpuMemory),
            "shared_memory": SharedMemoryPushes(http, self.begin, self._listeners.find, HostMemory),
        }
        """The kinds of shared memory, in the order that ``auto`` tries them. CUDA IPC is the first: it copies
        nothing through the host. It takes 1.5 GiB or more of the trainer's GPU, and is skipped if that is not free."""

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
        body = begin.model_dump_json(exclude_defaults=True).encode()  # of 19 000 tensors: a fifth of the time of a dict
        headers = {"Content-Type": "application/json"}
        reply = await self._http.send("POST", "/v1/weights", content=body, headers=headers, repeat=Repeat.IDEMPOTENT)
        return parse(UploadPlan, reply)

    async def quantizing(
        self, table: tuple[UploadTensor, ...], thread: TensorThread, batch_bytes: int | None = None
    ) -> tuple[Converter, tuple[UploadTensor, ...]]:
        """Return a converter that quantizes as the service would, and the table of its results.

        ``batch_bytes``: see ``Converter``. None: the converter's default.
        """
        made_for = await ControlCalls(self._http).recipe(), table, batch_bytes
        known = self._quantizing
        if known is None or known[0] != made_for:
            known = self._quantizing = made_for, *await thread.call(_converter_of, *made_for)
        return known[1:]

    async def commit(self, version: int, commit: CommitUpload) -> WeightStatus:
        """Make a version the newest. Raises UploadIncomplete, QuantizationError, CommitTimeout."""
        route, what = f"/v1/weights/{version}/commit", f"the commit of version {version}"
        return await self._load(route, commit, what, f"GET /v1/weights/{version} tells whether it is committed")

    async def roll_back(self, request: RollBack) -> WeightStatus:
        """Make a kept version the newest again. Raises NotFound, CommitTimeout."""
        what = f"the rollback to {request.to}"
        return await self._load("/v1/weights/rollback", request, what, "the same call again does no harm")

    async def _load(self, route: str, how: HowToLoad, what: str, instead: str) -> WeightStatus:
        body = how.model_dump(mode="json")
        return await self._http.commit(WeightStatus, route, body, timeout_s=how.timeout_s, what=what, instead=instead)

    async def send_tensors(self, push: Push) -> tuple[int, str]:
        """Announce a version and upload its missing parts. Returns the version number and the digest of the whole
        upload.

        Raises VersionConflict, InvalidManifest, NotShared if shared memory is required, or QuantizationError for
        weights that the trainer must quantize.
        """
        source, by_trainer = push.source, push.quantize == "trainer"
        async with every_rank_gathers(source, push.thread):
            table, stored = source.table, source.begin(own_memory=by_trainer)
            if by_trainer:
                converter, table = await self.quantizing(table, push.thread)
            for kind in self._ways_of(source, push.transport, table):
                checks: DeferredChecks | None = None
                if by_trainer:
                    from rollout_service.quant.deferred_checks import DeferredChecks  # imports torch

                    # host memory takes codes from the CPU; GPU memory and parts take them from any device
                    to_cpu = kind == "shared_memory"
                    checks = None if to_cpu else DeferredChecks()  # a copy to the CPU synchronizes anyhow
                    stored = converter.convert(source.remaining, to_cpu=to_cpu, checks=checks)
                sent = await self._shared[kind].push(push, table, stored, checks)
                if sent is not None:
                    return sent
                stored = source.begin(own_memory=by_trainer)
                if self._shared[kind].reached:  # the service dropped the batches it had; parts are kept, so send those
                    break
            if by_trainer:
                stored = converter.convert(source.remaining, to_cpu=False)
            cut = partial(cut_parts, bytes_of_each(stored), held=source.held)
            return await self.send_stream(push, push.announce(tensors=table), cut)

    async def send_stream(
        self, push: Push, announced: Announcement, cut: Callable[[int, list[torch.Tensor]], Iterator[Part]]
    ) -> tuple[int, str]:
        """Announce a version and upload the missing parts of its stream. Returns and raises as ``send_tensors``.

        ``cut``: ``cut_parts`` of the stream; called with the size of a part in bytes, and ``free``.
        """
        sender = await self.open(push, announced)
        parts = _made_in(push.thread, cut(sender.plan.part_bytes, sender.free))
        try:
            return sender.plan.version, await sender.send(parts, push.parallel_parts)
        except QuantizationError as error:
            raise staged_still(sender.plan.version, error) from error

    async def open(self, push: Push, announced: Announcement) -> PartSender:
        """Announce a version and return the sender of its parts. Raises InvalidManifest, VersionConflict,
        DeltaBaseGone."""
        plan = await self.begin(announced)
        listener = await self._listeners.find(plan)
        return PartSender(self._http, listener, announced.numbered(plan.version), plan, push.progress)


async def _made_in(thread: TensorThread, parts: Iterator[Part]) -> AsyncIterator[Part]:
    """Yield each part when it is requested, made in ``thread``."""
    while (part := await thread.call(next, parts, None)) is not None:
        yield part


def _converter_of(
    recipe: TrainerRecipe, table: tuple[UploadTensor, ...], batch_bytes: int | None
) -> tuple[Converter, tuple[UploadTensor, ...]]:
    from rollout_service.model.convert import BATCH_BYTES, Converter  # imports torch

    # CPU tensors stay on the CPU, because the trainer's GPU may have no room
    converter = Converter(recipe, device="cpu", batch_bytes=batch_bytes or BATCH_BYTES)
    return converter, tuple(converter.table(table))
