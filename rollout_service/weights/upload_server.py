"""The ingest's own HTTP listener for the bytes of weights.

Serve's proxy reads whole bodies into an unbounded queue, so parts have a door of their own: streamed to disk in
chunks, with back-pressure from the socket. It runs in the ingest's event loop.
"""

import asyncio
import logging
import socket
import uuid
from pathlib import Path

import uvicorn
import xxhash
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect

from rollout_service.errors import DigestMismatch, InvalidRequest, MalformedRequest, NotFound, PayloadTooLarge
from rollout_service.web.auth import Authorizer
from rollout_service.web.errors import install_error_handlers
from rollout_service.weights.ingest import Ingest
from rollout_service.weights.staging import StagedVersion
from rollout_service.weights.upload import PART_DIGEST_HEADER, PartReceipt

logger = logging.getLogger(__name__)


def create_upload_app(ingest: Ingest, authorizer: Authorizer) -> FastAPI:
    """One route: ``PUT /v1/weights/{version}/parts/{part}``."""
    app = FastAPI(openapi_url=None)
    install_error_handlers(app)

    @app.put("/v1/weights/{version}/parts/{part}")
    async def put_part(version: int, part: int, request: Request) -> PartReceipt:
        authorizer.check(request)
        staged = ingest.staged(version)
        if staged.begin.source is not None:
            raise InvalidRequest(f"version {version} is read from {staged.begin.source.path}: it takes no parts")
        if not 0 <= part < staged.num_parts:
            raise NotFound(f"version {version} has parts 0 to {staged.num_parts - 1}, not {part}")
        expected = request.headers.get(PART_DIGEST_HEADER)
        if expected is None:
            raise InvalidRequest(f"send the part's xxh3-128 in hex in the header {PART_DIGEST_HEADER}")
        nbytes, digest = await _receive(request, staged, part, expected)
        return PartReceipt(version=version, part=part, nbytes=nbytes, digest=digest)

    return app


async def _receive(request: Request, staged: StagedVersion, part: int, expected: str) -> tuple[int, str]:
    # two senders of one part must not write into the same file
    received = staged.part_path(part).with_suffix(f".{uuid.uuid4().hex}")
    try:
        nbytes, digest = await _to_disk(request, received, staged.part_size(part))
        if nbytes != staged.part_size(part):
            raise InvalidRequest(
                f"part {part} of version {staged.begin.version} must have {staged.part_size(part)} bytes, not {nbytes}",
                {"part": part, "expected_bytes": staged.part_size(part), "nbytes": nbytes},
            )
        if digest != expected.lower():
            raise DigestMismatch(
                f"part {part} of version {staged.begin.version} hashes to {digest}, but {PART_DIGEST_HEADER} says "
                f"{expected}: send it again",
                {"part": part, "digest": digest, "expected": expected},
            )
        staged.accept(part, digest, received)
    except ClientDisconnect as error:
        raise MalformedRequest(f"part {part} of version {staged.begin.version} was cut off: send it again") from error
    finally:
        received.unlink(missing_ok=True)
    return nbytes, digest


async def _to_disk(request: Request, path: Path, limit_bytes: int) -> tuple[int, str]:
    hasher, nbytes = xxhash.xxh3_128(), 0
    with path.open("wb") as stream:
        async for chunk in request.stream():
            nbytes += len(chunk)
            if nbytes > limit_bytes:
                raise PayloadTooLarge(
                    f"{path.stem} has {limit_bytes} bytes, and more came: cut the stream as UploadPlan says",
                    {"limit_bytes": limit_bytes},
                )
            hasher.update(chunk)
            stream.write(chunk)
    return nbytes, hasher.hexdigest()


class UploadServer:
    """The listener: ``url`` is known once ``start`` returns."""

    def __init__(self, app: FastAPI, host: str) -> None:
        # bound here, not by uvicorn, so that the port is known before the server runs
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's delay off only for sockets that say they are TCP
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind((host, 0))
        address = f"[{host}]" if ":" in host else host
        self.url = f"http://{address}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        logger.info("taking parts at %s", self.url)

    async def check_health(self) -> None:
        """Raise what ended the listener, if it has ended."""
        if self._serving is None or self._serving.done():
            cause = None if self._serving is None or self._serving.cancelled() else self._serving.exception()
            raise RuntimeError(f"the upload listener at {self.url} has stopped") from cause
