"""The ingest's own HTTP listener for the bytes of weights.

Serve's proxy reads whole bodies into an unbounded queue, so parts have a listener of their own: streamed to disk in
chunks, with back-pressure from the socket. It runs in the ingest's event loop.
"""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Annotated

import uvicorn
import xxhash
from fastapi import FastAPI, Query, Request
from starlette.requests import ClientDisconnect

from rollout_service.errors import (
    DigestMismatch,
    InvalidRequest,
    MalformedRequest,
    NotFound,
    PayloadTooLarge,
    VersionConflict,
)
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.metrics.process import count_part
from rollout_service.protocol.base import WeightVersion
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    UPLOADER_HEADER,
    ListenerProof,
    PartReceipt,
    part_size,
)
from rollout_service.store.direct_io import DirectFile, block_buffer
from rollout_service.store.durable_io import DISK_FULL, no_room
from rollout_service.store.upload_record import UploadRecord
from rollout_service.threads import to_thread_and_back
from rollout_service.tls import require_certificate
from rollout_service.web.auth import Authorizer
from rollout_service.web.errors import install_error_handlers

logger = logging.getLogger(__name__)
_BUFFER_BYTES = 1 << 20
_STOP_S = 5
"""How long parts on their way may take to end when the listener stops."""


def create_upload_app(ingest: Ingest, authorizer: Authorizer) -> FastAPI:
    """``PUT /v1/weights/{version}/parts/{part}``, and by what a trainer knows that it found this listener."""
    app = FastAPI(openapi_url=None)
    install_error_handlers(app)

    @app.get("/v1/weights/{version}/listener")
    async def prove(
        version: WeightVersion, nonce: Annotated[str, Query(min_length=16, max_length=128)]
    ) -> ListenerProof:
        if ingest.upload_address is None:
            raise NotFound("this is not an upload listener")
        return ListenerProof(proof=ingest.upload_address.proof(version, nonce))

    @app.put("/v1/weights/{version}/parts/{part}")
    async def put_part(version: WeightVersion, part: int, request: Request) -> PartReceipt:
        address = ingest.upload_address
        if address is None or not address.opens(version, request.headers.get(UPLOAD_KEY_HEADER)):
            authorizer.check(request)
        expected = request.headers.get(PART_DIGEST_HEADER)
        record = await ingest.committed(version)
        staged = ingest.staged(version) if record is None else None
        begin = staged.record if staged is not None else record
        assert begin is not None
        place = Place(begin, part)
        if expected is None:
            raise InvalidRequest(f"send the part's xxh3-128 in hex in the header {PART_DIGEST_HEADER}")
        if staged is None:
            return await _compare(request, place, expected)
        return await _receive(request, staged, place, expected)

    return app


class Place:
    """One part of one upload. Raises InvalidRequest or NotFound if there is no such part."""

    def __init__(self, record: UploadRecord, part: int) -> None:
        self.record, self.version, self.part = record, record.begin.version, part
        if record.begin.source is not None:
            raise InvalidRequest(f"version {self.version} is read from {record.begin.source}: it takes no parts")
        if not 0 <= part < record.num_parts:
            raise NotFound(f"version {self.version} has parts 0 to {record.num_parts - 1}, not {part}")
        self.nbytes = part_size(part, record.begin.nbytes, record.part_bytes)

    def check(self, nbytes: int, digest: str, expected: str) -> PartReceipt:
        """The receipt. Raises InvalidRequest or DigestMismatch if other bytes came than were announced."""
        if nbytes != self.nbytes:
            raise InvalidRequest(
                f"part {self.part} of version {self.version} must have {self.nbytes} bytes, not {nbytes}",
                {"part": self.part, "expected_bytes": self.nbytes, "nbytes": nbytes},
            )
        if digest != expected.lower():
            raise DigestMismatch(
                f"part {self.part} of version {self.version} hashes to {digest}, but {PART_DIGEST_HEADER} says "
                f"{expected}: send it again",
                {"part": self.part, "digest": digest, "expected": expected},
            )
        return PartReceipt(version=self.version, part=self.part, nbytes=nbytes, digest=digest)


async def _receive(request: Request, staged: UploadSession, place: Place, expected: str) -> PartReceipt:
    # two senders of one part must not write into the same file
    received = staged.incoming_path(place.part)
    try:
        data = staged.part_memory.take(place.nbytes)
        with DirectFile.create(received) as file:
            receipt = place.check(*await _read(request, place, file, data), expected)
        staged.accept(place.part, receipt.digest, received, request.headers.get(UPLOADER_HEADER, ""), data)
    except FileNotFoundError as error:  # its folder is gone
        raise NotFound(
            f"version {place.version} was discarded or committed before part {place.part} was complete"
        ) from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise no_room(f"part {place.part} of version {place.version}", received.parent, place.nbytes) from error
    finally:
        received.unlink(missing_ok=True)
    count_part(receipt.nbytes)
    return receipt


async def _compare(request: Request, place: Place, expected: str) -> PartReceipt:
    """A part of a committed version: it is the same, or it conflicts."""
    receipt = place.check(*await _read(request, place, None), expected)
    committed = place.record.part_digests[place.part]
    if receipt.digest != committed:
        raise VersionConflict(
            f"version {place.version} is committed, and its part {place.part} hashes to {committed}, not to "
            f"{receipt.digest}: push a newer version",
            {"part": place.part, "digests": [committed, receipt.digest]},
        )
    return receipt


async def _read(
    request: Request, place: Place, file: DirectFile | None, buffer: memoryview | None = None
) -> tuple[int, str]:
    """Number and digest of a body's bytes, written to ``file``, and kept in ``buffer`` if there is one for the part.

    The writing and hashing is done in a thread, so that a slow disk does not keep the event loop; meanwhile nothing
    more is taken from the socket, and ``file`` stays open although the caller goes away.
    """
    hasher, nbytes, flushed, base = xxhash.xxh3_128(), 0, 0, 0
    keep, buffer = buffer is not None, block_buffer(_BUFFER_BYTES) if buffer is None else buffer

    def flush() -> None:
        filled = buffer[flushed - base :]
        hasher.update(filled[: nbytes - flushed])
        if file is not None:
            file.write(filled, nbytes - flushed, flushed)

    try:
        async for chunk in request.stream():
            rest = memoryview(chunk)
            if nbytes + rest.nbytes > place.nbytes:
                raise PayloadTooLarge(
                    f"part {place.part} of version {place.version} has {place.nbytes} bytes, and more came: cut the "
                    "stream as UploadPlan says",
                    {"limit_bytes": place.nbytes},
                )
            while rest.nbytes:
                taken = min(rest.nbytes, flushed + _BUFFER_BYTES - nbytes)
                buffer[nbytes - base : nbytes - base + taken] = rest[:taken]
                nbytes, rest = nbytes + taken, rest[taken:]
                if nbytes - flushed == _BUFFER_BYTES:
                    await to_thread_and_back(flush)
                    flushed = nbytes
                    base = 0 if keep else nbytes
    except ClientDisconnect as error:
        raise MalformedRequest(f"part {place.part} of version {place.version} was cut off: send it again") from error
    if nbytes > flushed:
        await to_thread_and_back(flush)
    return nbytes, hasher.hexdigest()


class UploadServer:
    """The listener. ``port`` is what it is bound to."""

    def __init__(self, app: FastAPI, host: str, port: int = 0, certificate: tuple[Path, Path] | None = None) -> None:
        """
        Args:
            port: 0: any that is free.
            certificate: Files with its certificate and key; None: plain HTTP.

        Raises OSError if another process has the port, ValueError if the certificate or its key cannot be used.
        """
        certfile, keyfile = certificate or (None, None)
        self.certificate: str | None = None
        """What it shows, in PEM; None: it speaks plain HTTP."""
        if certfile is not None and keyfile is not None:
            settings = "weights.upload_ssl_certfile and weights.upload_ssl_keyfile"
            self.certificate = require_certificate(certfile, keyfile, settings)
        # bound here, not by uvicorn, so that the port is known before the server runs
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's delay off only for sockets that say they are TCP
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the one before linger
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"weights.upload_host {host}, weights.upload_port {port}: {error}") from error
        self.host, self.port = host, self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,  # see logs.py
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,  # who calls is who is connected, not whom a header names
                timeout_graceful_shutdown=_STOP_S,
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        encrypted = "" if self.certificate is None else ", with TLS"
        logger.info("taking parts on %s, port %d%s", self.host, self.port, encrypted)

    async def stop(self) -> None:
        """Take no more connections, let the parts on their way end for a moment, and close the socket."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._socket.close()

    async def check_health(self) -> None:
        """Raise what ended the listener, if it has ended."""
        if self._serving is None or self._serving.done():
            cause = None if self._serving is None or self._serving.cancelled() else self._serving.exception()
            raise RuntimeError(f"the upload listener on {self.host}, port {self.port}, has stopped") from cause
