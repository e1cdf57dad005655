"""Send one weight version in parts. ``rollout_service.protocol.upload`` describes the messages."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import httpx
from pydantic import ValidationError

from rollout_service.client._control import ControlCalls
from rollout_service.client._http import Http, http_timeout, parse
from rollout_service.client._parts import Part, bytes_of_each, cut_parts
from rollout_service.client._plain_http import PlainConnections
from rollout_service.client._retry import Repeat, error_of, retrying
from rollout_service.client._shared_memory import GpuMemory, HostMemory, SharedMemoryPushes
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, every_rank_gathers
from rollout_service.errors import (
    CommitTimeout,
    InvalidRequest,
    QuantizationError,
    RolloutServiceError,
    TableUnknown,
    VersionConflict,
)
from rollout_service.protocol.base import NEXT, NewVersion
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    UPLOADER_HEADER,
    Announcement,
    BeginUpload,
    CommitUpload,
    HowToLoad,
    ListenerProof,
    RollBack,
    TrainerRecipe,
    UploadPlan,
    UploadTensor,
    listener_proof,
    upload_digest,
    with_kv_scales,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.runtime.tasks import raise_first_failure
from rollout_service.runtime.threads import to_thread_and_back
from rollout_service.runtime.tls import PinnedCertificates

if TYPE_CHECKING:
    import torch

    from rollout_service.kv_scales import KVScales
    from rollout_service.model.convert import Converter

logger = logging.getLogger("rollout_service.client")

PART_READ_S = 120.0
PROOF_TIMEOUT = httpx.Timeout(5.0)
"""A short timeout, because a firewall may silently drop packets to a blocked address."""
COMMIT_GRACE_S = 120.0
"""Extra seconds for a commit, which converts and syncs the rest before it starts to wait for replicas."""

_KIND = {"Content-Type": "application/octet-stream"}

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
        self._http, self._direct, self._pinned, self._plain = http, direct, pinned, plain
        self._asked: _AskedListener = _AskedListener("")
        self._kept: _KeptTable | None = None
        self._quantizes: _Quantizes | None = None
        self._shared: dict[Shared, SharedMemoryPushes] = {
            "cuda_ipc": SharedMemoryPushes(http, self.begin, self._listener, GpuMemory),
            "shared_memory": SharedMemoryPushes(http, self.begin, self._listener, HostMemory),
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
        return PartSender(self._http, await self._listener(plan), announced.numbered(plan.version), plan, progress)

    async def discard(self, version: int) -> None:
        """Delete a staged version. Raises NotFound if it is not staged."""
        await ControlCalls(self._http).discard(version)

    async def _listener(self, plan: UploadPlan) -> DirectListener | None:
        """Return the ingest's direct listener, or None to send everything through the gateway.

        The listener must prove its identity before the client sends anything else. Another server may listen at that
        address on this machine or network.
        """
        if plan.upload_url is None or plan.upload_key is None:
            return None
        if self._asked.url != plan.upload_url:
            self._asked = _AskedListener(plan.upload_url)
        if not self._asked.is_due():
            return None
        url = plan.upload_url.rstrip("/")
        plain = PlainConnections(url, self._pinned.context, PART_READ_S) if self._plain else None
        listener = DirectListener(self._direct, url, plan.upload_key, plain)
        try:
            if httpx.URL(self._http.url).scheme == "https" and httpx.URL(listener.url).scheme != "https":
                raise RolloutServiceError("it is not encrypted, as the connection to the service is")
            if plan.upload_certificate is not None:
                self._pinned.add(plan.upload_certificate)
            await listener.prove(plan.version)
        except (httpx.TransportError, RolloutServiceError, ValueError) as error:
            skipped = self._asked.failed(is_slow=isinstance(error, httpx.TimeoutException))
            logger.warning(
                "weights go through %s, not directly to %s: %s; it is asked again %s",
                self._http.url, listener.url, reason_of(error),
                f"after {skipped} more pushes" if skipped else "at the next push",
            )  # fmt: skip
            return None
        self._asked.failures = 0
        return listener


class _AskedListener:
    """Counts failed proofs of a listener, and the pushes that skip it."""

    MAX_SKIPPED = 63

    def __init__(self, url: str) -> None:
        self.url, self.failures, self._skip = url, 0, 0

    def is_due(self) -> bool:
        """Return True if this push should try the listener. Call it once per push."""
        self._skip -= 1
        return self._skip < 0

    def failed(self, *, is_slow: bool) -> int:
        """Return the number of pushes that skip the listener: 1, 3, 7, …, or one step less after a slow answer."""
        self.failures += 1
        self._skip = min((1 << self.failures - is_slow) - 1, self.MAX_SKIPPED)
        return self._skip


def reason_of(error: Exception) -> str:
    """Return an error's class and message; timeouts have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class DirectListener:
    """The direct address of the ingest, for parts and for batches of shared memory."""

    def __init__(self, http: Http, url: str, key: str, plain: PlainConnections | None) -> None:
        """Create the listener.

        Args:
            http: connections that send no token.
            url: the ingest's address.
            key: the upload key, sent with every request.
            plain: connections for parts. None: parts go over ``http``.
        """
        self._http, self.url, self._key, self._plain = http, url, key, plain
        self.given_up = False

    async def prove(self, version: int) -> None:
        """Raise RolloutServiceError or ``httpx.TransportError`` unless the listener proves that it is the ingest."""
        nonce = secrets.token_hex(16)
        url = f"{self.url}/v1/weights/{version}/listener"
        reply = await self._http.send("GET", url, params={"nonce": nonce}, repeat=Repeat.NEVER, timeout=PROOF_TIMEOUT)
        proof = parse(ListenerProof, reply).proof
        if not hmac.compare_digest(proof.encode(), listener_proof(self._key, nonce).encode()):
            raise RolloutServiceError(f"what answers at {self.url} is not the service")

    async def put(self, route: str, part: Part, headers: dict[str, str], threads: ThreadPoolExecutor) -> bool:
        """Send a part, and return False if that failed for any reason. A plain connection uses one of ``threads``."""
        headers, repeat = headers | {UPLOAD_KEY_HEADER: self._key}, Repeat.IDEMPOTENT_ONCE_CONNECTED
        if self._plain is None:
            return await self._is_taken(lambda: _put(self._http, self.url + route, part, headers, repeat))
        plain = self._plain
        return await self._is_taken(lambda: self._put_plainly(plain, route, part, headers, repeat, threads))

    async def post(self, route: str, json: object) -> bool:
        """Send JSON, and return False if that failed for any reason."""
        return await self._is_taken(
            lambda: self._http.send(
                "POST",
                self.url + route,
                json=json,
                headers={UPLOAD_KEY_HEADER: self._key},
                repeat=Repeat.IDEMPOTENT_ONCE_CONNECTED,
                timeout=http_timeout(PART_READ_S),
            )
        )

    async def _is_taken(self, send: Callable[[], Awaitable[object]]) -> bool:
        if self.given_up:
            return False
        try:
            await send()
        except (httpx.TransportError, RolloutServiceError) as error:
            self.given_up = True
            logger.warning(
                "%s takes nothing any more, which now goes through the gateway: %s", self.url, reason_of(error)
            )
            return False
        return True

    async def _put_plainly(
        self,
        plain: PlainConnections,
        route: str,
        part: Part,
        headers: dict[str, str],
        repeat: Repeat,
        threads: ThreadPoolExecutor,
    ) -> None:
        async def attempt() -> httpx.Response:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, plain.put, route, part.pieces, headers | _KIND)

        response: httpx.Response = await retrying(repeat, self._http.retries)(attempt)
        if not response.is_success:
            raise error_of(response)

    def close(self) -> None:
        """Abort running requests. Nothing can be sent afterwards."""
        if self._plain is not None:
            self._plain.close()


class PartSender:
    """Uploads the parts of one announced version."""

    def __init__(
        self,
        http: Http,
        listener: DirectListener | None,
        begin: BeginUpload,
        plan: UploadPlan,
        progress: Progress | None,
    ) -> None:
        self._http, self._listener = http, listener
        self._begin, self._plan = begin, plan
        self.free: list[torch.Tensor] = []
        """Memory of finished parts, for reuse."""
        self._digests: dict[int, str] = {}
        self._progress = progress
        self._done_bytes = 0
        expected = begin.num_parts(plan.part_bytes)
        if plan.state == "staged" and plan.num_parts != expected:
            raise RolloutServiceError(
                f"the service wants {plan.num_parts} parts of {plan.part_bytes} bytes, and {begin.nbytes} bytes make "
                f"{expected}" + ("" if begin.delta is None else " parts of a delta"),
                {"num_parts": plan.num_parts, "part_bytes": plan.part_bytes, "nbytes": begin.nbytes},
            )

    @property
    def version(self) -> int:
        """The announced version."""
        return self._plan.version

    @property
    def part_bytes(self) -> int:
        """Size in bytes of each part except the last. Does not apply to a delta."""
        return self._plan.part_bytes

    @property
    def found_nothing(self) -> bool:
        """True if the service had no part of this version when it was announced. All parts then come from this
        caller."""
        return self._plan.state == "staged" and not self._plan.digests

    async def send(self, parts: AsyncIterable[Part], parallel: int) -> str:
        """Upload with at most ``parallel`` concurrent requests. Holds at most one more part in memory.

        Returns the digest of the whole upload.
        """
        slots = asyncio.Semaphore(parallel)
        threads = ThreadPoolExecutor(parallel, "push-parts")

        async def upload(part: Part) -> None:
            try:
                await self._upload(part, threads)
            finally:
                slots.release()
            if part.memory is not None:
                self.free.append(part.memory)

        try:
            async with raise_first_failure() as group:
                async for part in parts:
                    await slots.acquire()
                    group.create_task(upload(part))
        finally:
            if self._listener is not None:
                self._listener.close()
            await to_thread_and_back(threads.shutdown, cancel_futures=True)
        digests = [self._digests[index] for index in range(self._plan.num_parts)]
        return with_kv_scales(upload_digest(digests), self._begin.kv_scales)

    def _is_wanted(self, part: Part) -> bool:
        """Return True if the service needs the part. Raises VersionConflict if it has the part with other bytes."""
        known = self._plan.digests.get(part.index)
        if known is not None and known != part.digest and self._plan.replaces:
            return True
        if known is not None and known != part.digest:
            raise VersionConflict(
                f"part {part.index} of version {self._begin.version} was uploaded with other bytes before: push the "
                f"changed weights as a newer version, such as {NEXT!r}"
                + (
                    ", or make older weights that are kept the newest again with rollback(to=…)"
                    if self._plan.state == "committed"
                    else ", or discard() the staged one first"
                ),
                {"part": part.index, "digests": [known, part.digest]},
            )
        return known is None

    async def _upload(self, part: Part, threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        digest = self._digests[part.index] = await loop.run_in_executor(threads, lambda: part.digest)
        if self._is_wanted(part):
            route = f"/v1/weights/{self._begin.version}/parts/{part.index}"
            headers = {PART_DIGEST_HEADER: digest, UPLOADER_HEADER: self._begin.uploader}
            # if the listener refuses a part, the service itself decides
            if self._listener is None or not await self._listener.put(route, part, headers, threads):
                await _put(self._http, route, part, headers, Repeat.IDEMPOTENT)
        self._advance(part)

    def _advance(self, part: Part) -> None:
        self._done_bytes += part.counts
        if self._progress is not None:
            self._progress(self._done_bytes, self._begin.nbytes)


async def _made_in(thread: TensorThread, parts: Iterator[Part]) -> AsyncIterator[Part]:
    """Yield each part when it is requested, made in ``thread``."""
    while (part := await thread.call(next, parts, None)) is not None:
        yield part


async def _put(http: Http, url: str, part: Part, headers: dict[str, str], repeat: Repeat) -> None:
    headers = headers | _KIND | {"Content-Length": str(part.nbytes)}
    await http.send("PUT", url, content=part, headers=headers, repeat=repeat, timeout=http_timeout(PART_READ_S))


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
