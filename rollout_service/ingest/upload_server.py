"""The ingest's own HTTP listener, for parts of uploads and for batches in shared memory.

Serve's proxy reads whole bodies into an unbounded queue. Parts therefore have their own listener: plain sockets, one
thread for each connection, and bodies that go from the socket directly into the memory from which tensors are read. The
uploads live in the ingest's event loop, which a thread calls twice for each part: for its target, and to take it in.
Batches in shared memory are announced here too: through proxy and gateway, an announcement would take longer than its
conversion on a GPU.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

import xxhash
from pydantic import BaseModel, Field, ValidationError

from rollout_service.errors import (
    DigestMismatch,
    InvalidRequest,
    MalformedRequest,
    NotFound,
    PayloadTooLarge,
    RolloutServiceError,
    Unauthorized,
    VersionConflict,
)
from rollout_service.ingest.http_listener import Body, CutOff, HTTPListener, Reply, Request
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.staged_parts import Incoming
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.metrics.process import count_part
from rollout_service.protocol.base import WeightVersion
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    UPLOADER_HEADER,
    ListenerProof,
    PartReceipt,
    SharedTensors,
)
from rollout_service.runtime.tls import require_certificate
from rollout_service.store.buffers import ThreadBuffers
from rollout_service.store.durable_io import DISK_FULL, no_room, not_written
from rollout_service.store.upload_record import UploadRecord
from rollout_service.web.errors import validation_error

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

PIECE_BYTES = 1 << 20
"""Size in bytes of the pieces in which a body is read, hashed and written: small enough to be in the CPU's cache when
it is hashed."""
MOST_JSON_BYTES = 32 << 20
"""Maximum size of a JSON body in bytes: 100 000 tensors with names of 256 characters."""
STOP_S = 5.0
"""Time in seconds for running uploads to end when the listener stops."""


class _VersionRoute(BaseModel):
    version: WeightVersion


class _PartRoute(_VersionRoute):
    part: int


class _ProofRoute(_VersionRoute):
    nonce: Annotated[str, Field(min_length=16, max_length=128)]


_PART_PATH = re.compile(r"/v1/weights/([^/]+)/parts/([^/]+)")
_SHARED_PATH = re.compile(r"/v1/weights/([^/]+)/shared")
_PROOF_PATH = re.compile(r"/v1/weights/([^/]+)/listener")
_DIGEST = re.compile("[0-9a-f]{32}")


def _json_of(body: Body) -> bytes:
    """Read the whole body. Raises PayloadTooLarge or CutOff."""
    if body.nbytes > MOST_JSON_BYTES:
        raise PayloadTooLarge(f"JSON has at most {MOST_JSON_BYTES} bytes here: send fewer tensors at once")
    memory = bytearray(body.nbytes)
    body.read_into(memoryview(memory))
    return bytes(memory)


class _NoMethod(InvalidRequest):
    """Raised for a route that exists only for other methods."""


def _require_method(method: str, request: Request) -> None:
    if request.method != method:
        raise _NoMethod(f"{request.method} {urlsplit(request.target).path}: only {method} is answered here")


def require_part(record: UploadRecord, part: int, nbytes: int) -> None:
    """Raise InvalidRequest or NotFound if there is no such part, PayloadTooLarge or InvalidRequest for another size."""
    version, is_delta = record.begin.version, record.begin.delta is not None
    if record.begin.source is not None:
        raise InvalidRequest(f"version {version} is read from {record.begin.source}: it takes no parts")
    if not 0 <= part < record.num_parts:
        raise NotFound(f"version {version} has parts 0 to {record.num_parts - 1}, not {part}")
    limit = record.slots[part].nbytes
    if nbytes > limit:
        raise PayloadTooLarge(
            f"part {part} of version {version} has {limit} bytes, and {nbytes} are sent: cut the stream as UploadPlan "
            "says" + ("; a delta that has more is sent as a whole version" if is_delta else ""),
            {"limit_bytes": limit},
        )
    if not nbytes or (nbytes < limit and not is_delta):
        raise InvalidRequest(
            f"part {part} of version {version} must have {limit} bytes, not {nbytes}",
            {"part": part, "expected_bytes": limit, "nbytes": nbytes},
        )


def _require_committed(record: UploadRecord, receipt: PartReceipt) -> None:
    """Raise VersionConflict if a committed version has other bytes."""
    committed = record.part_digests[receipt.part]
    if receipt.digest != committed:
        raise VersionConflict(
            f"version {receipt.version} is committed, and its part {receipt.part} hashes to {committed}, not to "
            f"{receipt.digest}: push a newer version",
            {"part": receipt.part, "digests": [committed, receipt.digest]},
        )


class UploadServer:
    """The listener. ``port`` is the port that it is bound to.

    Its routes: ``PUT /v1/weights/{version}/parts/{part}``, ``POST /v1/weights/{version}/shared``, and
    ``GET /v1/weights/{version}/listener``, which proves the listener's identity.
    """

    def __init__(
        self,
        ingest: Ingest,
        host: str,
        port: int = 0,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """
        Args:
            port: 0: any free port.
            certificate: files with its certificate and key; None: plain HTTP.

        Raises OSError if another process has the port, ValueError if the certificate or its key is invalid.
        """
        self._ingest, self._buffers = ingest, ThreadBuffers()
        self.certificate: str | None = None
        """Its certificate in PEM; None: it uses plain HTTP."""
        tls: ssl.SSLContext | None = None
        if certificate is not None:
            certfile, keyfile = certificate
            settings = "weights.upload_ssl_certfile and weights.upload_ssl_keyfile"
            self.certificate = require_certificate(certfile, keyfile, settings)
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(certfile, keyfile)
        try:
            self._listener = HTTPListener(host, port, tls)
        except OSError as error:
            raise OSError(error.errno, f"weights.upload_host {host}, weights.upload_port {port}: {error}") from error
        self.host, self.port = host, self._listener.server_address[1]

    def start(self) -> None:
        """Start serving; the ingest lives in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.start(self._reply)
        encrypted = "" if self.certificate is None else ", with TLS"
        logger.info("taking parts on %s, port %d%s", self.host, self.port, encrypted)

    async def stop(self) -> None:
        """Stop accepting connections, give running uploads a moment to end, and end every thread."""
        await asyncio.to_thread(self._listener.stop, STOP_S)

    async def check_health(self) -> None:
        """Raise RuntimeError if the listener has ended."""
        if not self._listener.is_serving:
            raise RuntimeError(f"the upload listener on {self.host}, port {self.port}, has stopped")

    def _reply(self, request: Request) -> Reply:
        """Answer one request. Called in a connection's thread; raises nothing but ``CutOff``."""
        try:
            url = urlsplit(request.target)
        except ValueError as error:
            return Reply.of_error(MalformedRequest(f"{request.target!r} is not a request target: {error}"))
        route = f"{request.method} {url.path}"
        try:
            answer = self._answer(url, request)
            return Reply(204, b"") if answer is None else Reply.of_json(answer.model_dump(mode="json"))
        except ValidationError as error:
            return Reply.of_error(validation_error(route, error.errors()))
        except _NoMethod as error:
            return Reply.of_error(InvalidRequest(error.message), 405)  # clients do not know the class
        except RolloutServiceError as error:
            return Reply.of_error(error)
        except CutOff:
            raise
        except Exception as error:  # the caller must get an answer for any error; the log has the traceback
            logger.exception("%s failed", route)
            message = f"{route} failed with {type(error).__name__}: the service's log says more"
            return Reply.of_error(RolloutServiceError(message))

    def _answer(self, url: SplitResult, request: Request) -> BaseModel | None:
        if match := _PART_PATH.fullmatch(url.path):
            _require_method("PUT", request)
            part = _PartRoute.model_validate_strings({"version": match[1], "part": match[2]})
            return self._put_part(part.version, part.part, request)
        if match := _SHARED_PATH.fullmatch(url.path):
            _require_method("POST", request)
            self._take_shared(_VersionRoute.model_validate_strings({"version": match[1]}).version, request)
            return None
        if match := _PROOF_PATH.fullmatch(url.path):
            _require_method("GET", request)
            asked = {name: values[0] for name, values in parse_qs(url.query).items() if name == "nonce"}
            proof = _ProofRoute.model_validate_strings({"version": match[1], **asked})
            if self._ingest.upload_address is None:
                raise NotFound("this is not an upload listener")
            return ListenerProof(proof=self._ingest.upload_address.proof(proof.version, proof.nonce))
        raise NotFound(f"{request.method} {url.path}: there is nothing here but where weights are sent")

    def _authorize(self, version: int, request: Request) -> None:
        address = self._ingest.upload_address
        if address is None or not address.opens(version, request.headers.get(UPLOAD_KEY_HEADER)):
            raise Unauthorized(
                f"{UPLOAD_KEY_HEADER} is not the key of version {version} here: send parts to the service's own address"
            )

    def _take_shared(self, version: int, request: Request) -> None:
        self._authorize(version, request)
        batch = SharedTensors.model_validate_json(_json_of(request.body))
        self._in_loop(self._ingest.take_shared(version, batch))

    def _put_part(self, version: int, part: int, request: Request) -> PartReceipt:
        self._authorize(version, request)
        headers, body = request.headers, request.body
        expected = headers.get(PART_DIGEST_HEADER, "").lower()
        if _DIGEST.fullmatch(expected) is None:
            raise InvalidRequest(f"send the part's xxh3-128, 32 hexadecimal digits, in the header {PART_DIGEST_HEADER}")
        receipt = PartReceipt(version=version, part=part, nbytes=body.nbytes, digest=expected)
        uploader = headers.get(UPLOADER_HEADER, "")
        staged, incoming = self._in_loop(self._begin(receipt, uploader, body))
        if staged is None or incoming is None:
            self._read(body, receipt, None)
        else:
            self._receive(body, staged, incoming, receipt, uploader)
        return receipt

    async def _begin(
        self, receipt: PartReceipt, uploader: str, body: Body
    ) -> tuple[UploadSession | None, Incoming | None]:
        """Return the session of an upload, and the part that it begins to receive. None: the same bytes are there."""
        version, part = receipt.version, receipt.part
        record = await self._ingest.committed(version)
        if record is not None:
            require_part(record, part, body.nbytes)
            _require_committed(record, receipt)
            return None, None
        staged = self._ingest.staged(version)
        require_part(staged.record, part, body.nbytes)
        return staged, await staged.begin_part(part, body.nbytes, receipt.digest, uploader, body.abort)

    def _receive(
        self, body: Body, staged: UploadSession, incoming: Incoming, receipt: PartReceipt, uploader: str
    ) -> None:
        try:
            incoming.open()
            self._read(body, receipt, incoming)
            self._in_loop(staged.accept(incoming, receipt.digest, uploader))
        except FileNotFoundError as error:  # its folder is gone
            raise NotFound(
                f"version {receipt.version} was discarded or committed before part {receipt.part} was complete"
            ) from error
        except OSError as error:
            what = f"part {receipt.part} of version {receipt.version}"
            if error.errno in DISK_FULL:
                raise no_room(what, staged.folder.parent, receipt.nbytes) from error
            raise not_written(f"{what} was not stored", error, "send it again") from error
        finally:
            incoming.close()
            if not incoming.ended.is_set():
                self._loop.call_soon_threadsafe(staged.parts.end, incoming)
        count_part(receipt.nbytes)

    def _read(self, body: Body, receipt: PartReceipt, incoming: Incoming | None) -> None:
        """Read a body into ``incoming``; None: only compare it. Raises DigestMismatch or MalformedRequest."""
        hasher, memory = xxhash.xxh3_128(), None if incoming is None else incoming.memory
        try:
            while body.left:
                start, count = body.nbytes - body.left, min(PIECE_BYTES, body.left)
                piece = self._buffers.take(PIECE_BYTES)[:count] if memory is None else memory[start : start + count]
                body.read_into(piece)
                hasher.update(piece)
                if incoming is not None:
                    incoming.write(start, piece)
        except CutOff as error:
            raise MalformedRequest(
                f"part {receipt.part} of version {receipt.version} was cut off ({error}): send it again"
            ) from error
        if (digest := hasher.hexdigest()) != receipt.digest:
            raise DigestMismatch(
                f"part {receipt.part} of version {receipt.version} hashes to {digest}, but {PART_DIGEST_HEADER} says "
                f"{receipt.digest}: send it again",
                {"part": receipt.part, "digest": digest, "expected": receipt.digest},
            )

    def _in_loop(self, work: Coroutine[object, None, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
