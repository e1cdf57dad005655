"""Send the parts of one announced version, to the ingest directly or through the gateway."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from rollout_service.client._http import Http, http_timeout, parse
from rollout_service.client._parts import Part
from rollout_service.client._plain_http import PlainConnections
from rollout_service.client._retry import Repeat, error_of, retrying
from rollout_service.client._tensors import Progress
from rollout_service.errors import RolloutServiceError, VersionConflict
from rollout_service.protocol.base import NEXT
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    UPLOADER_HEADER,
    BeginUpload,
    ListenerProof,
    UploadPlan,
    listener_proof,
    upload_digest,
    with_kv_scales,
)
from rollout_service.runtime.tasks import raise_first_failure
from rollout_service.runtime.threads import to_thread_and_back
from rollout_service.runtime.tls import PinnedCertificates

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rollout_service.client")

PART_READ_S = 120.0
PROOF_TIMEOUT = httpx.Timeout(5.0)
"""A short timeout, because a firewall may silently drop packets to a blocked address."""
RETRY_S = 60.0
"""Time in seconds after which a listener that did not prove itself is asked again."""
_KIND = {"Content-Type": "application/octet-stream"}


class DirectListeners:
    """Finds the ingest's direct listener for each push of one client."""

    def __init__(self, http: Http, direct: Http, pinned: PinnedCertificates, *, plain: bool) -> None:
        """Create it. See ``Uploader``."""
        self._http, self._direct, self._pinned, self._plain = http, direct, pinned, plain
        self._failed_url, self._retry_at = "", 0.0

    async def find(self, plan: UploadPlan) -> DirectListener | None:
        """Return the ingest's direct listener, or None to send everything through the gateway.

        The listener must prove its identity before the client sends anything else. Another server may listen at that
        address on this machine or network.
        """
        if plan.upload_url is None or plan.upload_key is None:
            return None
        if plan.upload_url == self._failed_url and time.monotonic() < self._retry_at:
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
            self._failed_url, self._retry_at = plan.upload_url, time.monotonic() + RETRY_S
            logger.warning(
                "weights go through %s, not directly to %s: %s; it is asked again after %g s",
                self._http.url, listener.url, reason_of(error), RETRY_S,
            )  # fmt: skip
            return None
        return listener


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
        """Return True if the service needs the part. Raises VersionConflict if the version is committed with other
        bytes."""
        known = self._plan.digests.get(part.index)
        if self._plan.state == "committed" and known != part.digest:
            raise VersionConflict(
                f"part {part.index} of version {self._begin.version} was committed with other bytes: push the changed "
                f"weights as a newer version, such as {NEXT!r}, or make older weights that are kept the newest again "
                "with rollback(to=…)",
                {"part": part.index, "digests": [known, part.digest]},
            )
        return known != part.digest

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


async def _put(http: Http, url: str, part: Part, headers: dict[str, str], repeat: Repeat) -> None:
    headers = headers | _KIND | {"Content-Length": str(part.nbytes)}
    await http.send("PUT", url, content=part, headers=headers, repeat=repeat, timeout=http_timeout(PART_READ_S))
