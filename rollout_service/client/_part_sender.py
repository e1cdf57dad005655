"""Send the parts of one announced version, to the ingest directly or through the gateway.

Threads send parts to the ingest over the standard library's HTTP client, which copies no byte of a body. Errors and
replies are httpx's, so that the same rules of repetition apply to all requests of a client.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import logging
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from rollout_service.client._http import CONNECT_S, WRITE_S, Http, Repeat, error_of, http_timeout, parse, retrying
from rollout_service.client._parts import Part
from rollout_service.client._tensors import Progress
from rollout_service.errors import (
    InvalidDelta,
    InvalidManifest,
    QuantizationError,
    RolloutServiceError,
    VersionConflict,
)
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
_LARGEST_REPLY_BYTES = 1 << 20
_REFUSED = (InvalidDelta, InvalidManifest, QuantizationError, VersionConflict)
"""Errors of what was sent, and not of the way that it took."""


class DirectListeners:
    """Finds the ingest's direct listener for each push of one client."""

    def __init__(self, http: Http, direct: Http, pinned: PinnedCertificates, *, plain: bool) -> None:
        """Create it.

        ``direct``: connections without a token, which trust the certificates of ``pinned``. ``plain``: True to send
        parts over ``PlainConnections`` instead.
        """
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
            if httpx.URL(self._http.url).scheme == "https" and httpx.URL(url).scheme != "https":
                raise RolloutServiceError("it is not encrypted, as the connection to the service is")
            if plan.upload_certificate is not None:
                self._pinned.add(plan.upload_certificate)
            await listener.prove(plan.version)
        except (httpx.TransportError, RolloutServiceError, ValueError) as error:
            self._failed_url, self._retry_at = plan.upload_url, time.monotonic() + RETRY_S
            logger.warning(
                "weights go through %s, not directly to %s: %s; it is asked again after %g s",
                self._http.url, url, _reason_of(error), RETRY_S,
            )  # fmt: skip
            return None
        return listener


def _reason_of(error: Exception) -> str:
    """Return an error's class and message; timeouts have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class DirectListener:
    """The direct address of the ingest, for parts and for batches of shared memory. It gets no token."""

    def __init__(self, http: Http, url: str, key: str, plain: PlainConnections | None) -> None:
        """Create the listener. ``key``: sent with every request. ``plain``: connections for parts; None: ``http``."""
        self._http, self._url, self._key, self._plain = http, url, key, plain
        self._given_up = False

    async def prove(self, version: int) -> None:
        """Raise RolloutServiceError or ``httpx.TransportError`` unless the listener proves that it is the ingest."""
        nonce = secrets.token_hex(16)
        url = f"{self._url}/v1/weights/{version}/listener"
        reply = await self._http.send("GET", url, params={"nonce": nonce}, repeat=Repeat.NEVER, timeout=PROOF_TIMEOUT)
        proof = parse(ListenerProof, reply).proof
        if not hmac.compare_digest(proof.encode(), listener_proof(self._key, nonce).encode()):
            raise RolloutServiceError(f"what answers at {self._url} is not the service")

    async def put(self, route: str, part: Part, headers: dict[str, str], threads: ThreadPoolExecutor) -> bool:
        """Send a part, and return False if it must go through the gateway. Raises the errors of ``_REFUSED``.

        A plain connection uses one of ``threads``.
        """
        headers, repeat = headers | {UPLOAD_KEY_HEADER: self._key}, Repeat.IDEMPOTENT_ONCE_CONNECTED
        if (plain := self._plain) is None:
            return await self._is_taken(_put(self._http, self._url + route, part, headers, repeat))

        async def attempt() -> httpx.Response:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, plain.put, route, part.pieces, headers | _KIND)

        async def send() -> None:
            response: httpx.Response = await retrying(repeat, self._http.retries)(attempt)
            if not response.is_success:
                raise error_of(response)

        return await self._is_taken(send())

    async def post(self, route: str, json: object) -> bool:
        """Send JSON, and return False if it must go through the gateway. Raises the errors of ``_REFUSED``."""
        return await self._is_taken(
            self._http.send(
                "POST",
                self._url + route,
                json=json,
                headers={UPLOAD_KEY_HEADER: self._key},
                repeat=Repeat.IDEMPOTENT_ONCE_CONNECTED,
                timeout=http_timeout(PART_READ_S),
            )
        )

    async def _is_taken(self, sending: Coroutine[object, None, object]) -> bool:
        if self._given_up:
            sending.close()
            return False
        try:
            await sending
        except _REFUSED:
            raise  # the gateway would forward the same to the same ingest
        except (httpx.TransportError, RolloutServiceError) as error:
            if not self._given_up:  # by another part
                logger.warning(
                    "%s takes nothing any more, which now goes through the gateway: %s", self._url, _reason_of(error)
                )
            self._given_up = True
            return False
        return True

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
        self._http, self._listener, self._begin, self.plan = http, listener, begin, plan
        self.free: list[torch.Tensor] = []
        """Memory of finished parts, for reuse."""
        self._digests: dict[int, str] = {}
        self._progress, self._done_bytes = progress, 0
        expected = begin.num_parts(plan.part_bytes)
        if plan.state == "staged" and plan.num_parts != expected:
            raise RolloutServiceError(
                f"the service wants {plan.num_parts} parts of {plan.part_bytes} bytes, and {begin.nbytes} bytes make "
                f"{expected}" + ("" if begin.delta is None else " parts of a delta"),
                {"num_parts": plan.num_parts, "part_bytes": plan.part_bytes, "nbytes": begin.nbytes},
            )

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
        digests = [self._digests[index] for index in range(self.plan.num_parts)]
        return with_kv_scales(upload_digest(digests), self._begin.kv_scales)

    async def _upload(self, part: Part, threads: ThreadPoolExecutor) -> None:
        """Send a part if the service needs it. Raises VersionConflict if the version is committed with other bytes."""
        loop = asyncio.get_running_loop()
        digest = self._digests[part.index] = await loop.run_in_executor(threads, lambda: part.digest)
        if (known := self.plan.digests.get(part.index)) != digest:
            if self.plan.state == "committed":
                raise VersionConflict(
                    f"part {part.index} of version {self.plan.version} was committed with other bytes: push the "
                    f"changed weights as a newer version, such as {NEXT!r}, or make older weights that are kept the "
                    "newest again with rollback(to=…)",
                    {"part": part.index, "digests": [known, digest]},
                )
            route = f"/v1/weights/{self.plan.version}/parts/{part.index}"
            headers = {PART_DIGEST_HEADER: digest, UPLOADER_HEADER: self._begin.uploader}
            # if the listener refuses a part, the service itself decides
            if self._listener is None or not await self._listener.put(route, part, headers, threads):
                await _put(self._http, route, part, headers, Repeat.IDEMPOTENT)
        self._done_bytes += part.counts
        if self._progress is not None:
            self._progress(self._done_bytes, self._begin.nbytes)


async def _put(http: Http, url: str, part: Part, headers: dict[str, str], repeat: Repeat) -> None:
    headers = headers | _KIND | {"Content-Length": str(part.nbytes)}
    await http.send("PUT", url, content=part, headers=headers, repeat=repeat, timeout=http_timeout(PART_READ_S))


class PlainConnections:
    """A pool of connections to one address. One thread at a time uses a connection, which stays open until
    ``close``."""

    def __init__(self, url: str, tls: ssl.SSLContext, read_s: float) -> None:
        """Create the pool. ``tls``: trust settings of an https ``url``. ``read_s``: maximum seconds until a reply."""
        self._url, self._tls, self._read_s = httpx.URL(url), tls, read_s
        self._lock = threading.Lock()
        self._all: set[http.client.HTTPConnection] = set()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def put(self, route: str, body: Sequence[memoryview], headers: Mapping[str, str]) -> httpx.Response:
        """Send a body, piece by piece, and return the reply with any status. Raises ``httpx.TransportError``."""
        connection = self._taken()
        request = httpx.Request("PUT", str(self._url) + route)
        try:
            response = self._exchange(connection, request, body, headers)
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            if connection.sock is not None and not self._closed:
                self._idle.append(connection)
                return response
        self._drop(connection)
        return response

    def close(self) -> None:
        """Abort all running requests, which then raise ``httpx.TransportError``. Thread-safe."""
        with self._lock:
            self._closed = True
            for connection in self._all:
                _shut(connection)
            idle, self._idle = self._idle, []
        for connection in idle:
            self._drop(connection)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        request: httpx.Request,
        body: Sequence[memoryview],
        headers: Mapping[str, str],
    ) -> httpx.Response:
        if connection.sock is None:
            self._connect(connection, request)
        try:
            path = request.url.raw_path.decode("ascii")
            length = str(sum(piece.nbytes for piece in body))
            try:
                connection.request("PUT", path, body, {**headers, "Content-Length": length})
            except (BrokenPipeError, ConnectionResetError) as error:
                sent: Exception | None = error  # the server may have replied before it closed the connection
            except (TimeoutError, BlockingIOError) as error:
                write_s = self._read_s if isinstance(connection, http.client.HTTPSConnection) else WRITE_S
                raise httpx.WriteTimeout(f"nothing was accepted for {write_s:g} s", request=request) from error
            else:
                sent = None
            try:
                reply = connection.getresponse()
                content = reply.read(_LARGEST_REPLY_BYTES)
                if reply.length:  # ``read`` with a size does not raise for a truncated body
                    raise http.client.IncompleteRead(content, reply.length)
            except (OSError, http.client.HTTPException):
                if sent is not None:
                    raise sent from None
                raise
        except (TimeoutError, BlockingIOError) as error:
            raise httpx.ReadTimeout(f"no answer for {self._read_s:g} s", request=request) from error
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ReadError(f"the connection broke: {error!r}", request=request) from error
        return httpx.Response(reply.status, headers=reply.getheaders(), content=content, request=request)

    def _connect(self, connection: http.client.HTTPConnection, request: httpx.Request) -> None:
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        if isinstance(connection, http.client.HTTPSConnection):
            connection.sock.settimeout(self._read_s)
        else:
            # kernel timeouts instead of Python's: with those, sending a body takes the GIL once for each piece of free
            # buffer space
            connection.sock.settimeout(None)
            for option, seconds in ((socket.SO_SNDTIMEO, WRITE_S), (socket.SO_RCVTIMEO, self._read_s)):
                connection.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))
        with self._lock:
            if self._closed:
                raise httpx.ConnectError("the push has ended", request=request)

    def _taken(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else self._new()
            if connection.sock is None or not _has_ended(connection.sock):
                return connection
            self._drop(connection)

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._url.host, self._url.port
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        self._all.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()


def _has_ended(sock: socket.socket) -> bool:
    """Return True if the peer has closed an idle connection."""
    poll = select.poll()  # not MSG_DONTWAIT: Python itself waits first on a socket with a timeout
    poll.register(sock, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        came = socket.socket.recv(sock, 1, socket.MSG_PEEK)  # an SSL socket's own ``recv`` accepts no flags
    except OSError:
        return True
    return not came or not isinstance(sock, ssl.SSLSocket)  # a TLS server sends session tickets unasked


def _shut(connection: http.client.HTTPConnection) -> None:
    if (sock := connection.sock) is not None:  # else it is still being created
        with suppress(OSError):  # it is closed
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
