"""A service for tests of the client: a real HTTP server that keeps the contract of uploads, in memory, no engine."""

import asyncio
import json
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_service.errors import (
    DigestMismatch,
    NotFound,
    RolloutServiceError,
    TooEarly,
    Unauthorized,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    Announcement,
    BeginUpload,
    CommitUpload,
    PartReceipt,
    TrainerRecipe,
    UploadPlan,
    listener_proof,
    upload_digest,
)
from rollout_service.protocol.weights import WeightStatus
from tests.support.serving import serving

Handler = Callable[[Request], Awaitable[Response]]


class Upload:
    """One version as far as it has come."""

    def __init__(self, begin: BeginUpload) -> None:
        self.begin = begin
        self.parts: dict[int, bytes] = {}
        self.digests: dict[int, str] = {}
        self.state = "staged"
        self.commit: CommitUpload | None = None

    @property
    def stream(self) -> bytes:
        return b"".join(data for _, data in sorted(self.parts.items()))


class Service:
    """Answers what a test tells it to; by default, everything works."""

    def __init__(self) -> None:
        self.url = ""
        self.upload_url: str | None = None
        """Address announced for parts; None: none."""
        self.upload_certificate: str | None = None
        """Announced with it."""
        self.upload_key = "key"
        """What proves that a listener is the service's; two with the same are one service."""
        self.headers: list[tuple[str, Mapping[str, str]]] = []
        """Path and headers of every request."""
        self.token: str | None = None
        self.is_newer = False
        """Replies have fields that the client does not know."""
        self.part_bytes = 1024
        self.recipe = TrainerRecipe(weights="fp8_block")
        """What trainers are told; by default that nothing is quantized."""
        self.uploads: dict[int, Upload] = {}
        self.log: list[tuple[str, str]] = []
        """Method and path of every request, those that were refused included."""
        self.client_ports: list[int] = []
        """By which every request came."""
        self.bodies: list[Any] = []
        """JSON bodies of generate requests."""
        self.answers: dict[tuple[str, str], deque[Response | RolloutServiceError]] = defaultdict(deque)
        """What to answer instead, once each, by method and path."""
        self.generate: Handler = self._generate
        self.status: Callable[[Upload], WeightStatus] = self._status
        self.before_part: Callable[[int], Awaitable[None]] | None = None
        routes = {
            ("POST", "/inference/v1/generate"): lambda request: self.generate(request),
            ("GET", "/v1/weights/recipe"): self._recipe,
            ("POST", "/v1/weights"): self._begin,
            ("GET", "/v1/weights"): self._list,
            ("GET", "/v1/weights/{version:int}"): self._get,
            ("GET", "/v1/weights/{version:int}/listener"): self._prove,
            ("DELETE", "/v1/weights/{version:int}"): self._delete,
            ("PUT", "/v1/weights/{version:int}/parts/{part:int}"): self._put,
            ("POST", "/v1/weights/{version:int}/commit"): self._commit,
        }
        self.app = Starlette(
            routes=[Route(path, self._route(handler), methods=[method]) for (method, path), handler in routes.items()]
        )

    def json_at(self, method: str, path: str, body: Any, status: int = 200) -> None:
        """Let one more route answer with ``body``."""

        async def answer(_: Request) -> Response:
            return JSONResponse(body, status)

        self.app.router.routes.append(Route(path, self._route(answer), methods=[method]))

    def calls(self, method: str, path: str) -> int:
        """How often a route was called."""
        return self.log.count((method, path))

    def parts_sent(self) -> list[int]:
        """Parts in the order their requests came, repeated ones included."""
        return [int(path.rsplit("/", 1)[1]) for method, path in self.log if method == "PUT"]

    def _route(self, handler: Handler) -> Handler:
        async def route(request: Request) -> Response:
            self.log.append((request.method, request.url.path))
            self.headers.append((request.url.path, request.headers))
            if request.client is not None:
                self.client_ports.append(request.client.port)
            try:
                if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                    raise Unauthorized("wrong or missing bearer token")
                if prepared := self.answers[request.method, request.url.path]:
                    answer = prepared.popleft()
                    if isinstance(answer, RolloutServiceError):
                        raise answer
                    return answer
                answer = await handler(request)
                if self.is_newer and answer.body:
                    return JSONResponse(_with_more(json.loads(answer.body)), answer.status_code)
                return answer
            except RolloutServiceError as error:
                return error_response(error)

        return route

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return JSONResponse(generate_reply(body))

    async def _recipe(self, _: Request) -> Response:
        return JSONResponse(self.recipe.model_dump(mode="json"))

    async def _begin(self, request: Request) -> Response:
        announced = Announcement.model_validate_json(await request.body())
        begin = announced.numbered(self._number_of(announced))
        upload = self.uploads.setdefault(begin.version, Upload(begin))
        if not upload.begin.describes_what(begin):
            if upload.state == "committed":
                raise VersionConflict(f"version {begin.version} was announced with other tensors")
            upload = self.uploads[begin.version] = Upload(begin)
        total = begin.num_parts(self.part_bytes)
        plan = UploadPlan(
            version=begin.version,
            state=upload.state,
            part_bytes=self.part_bytes,
            num_parts=total,
            missing_parts=tuple(part for part in range(total) if part not in upload.parts),
            digests=upload.digests,
            upload_url=self.upload_url,
            upload_key=self.upload_url and self.upload_key,
            upload_certificate=self.upload_certificate,
        )
        return JSONResponse(plan.model_dump(mode="json"), 201)

    def _number_of(self, announced: Announcement) -> int:
        if announced.version != "next":
            return announced.version
        for version, upload in self.uploads.items():
            if upload.state == "staged" and announced.label is not None and upload.begin.label == announced.label:
                return version
        return max(self.uploads, default=0) + 1

    async def _prove(self, request: Request) -> Response:
        return JSONResponse({"proof": listener_proof(self.upload_key, request.query_params["nonce"])})

    async def _put(self, request: Request) -> Response:
        upload, part = self._upload(request), request.path_params["part"]
        if self.before_part is not None:
            await self.before_part(part)
        data = await request.body()
        digest = request.headers[PART_DIGEST_HEADER]
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise DigestMismatch(f"part {part} does not hash to {digest}")
        if upload.begin.delta is None and len(data) != list(upload.begin.slots(self.part_bytes))[part].nbytes:
            raise DigestMismatch(f"part {part} has {len(data)} bytes")
        if upload.digests.get(part, digest) != digest and upload.state == "committed":
            raise VersionConflict(f"part {part} came with other bytes before")
        upload.digests[part] = digest
        upload.parts[part] = data
        receipt = PartReceipt(version=upload.begin.version, part=part, nbytes=len(data), digest=digest)
        return JSONResponse(receipt.model_dump(mode="json"))

    async def _commit(self, request: Request) -> Response:
        upload = self._upload(request)
        commit = CommitUpload.model_validate_json(await request.body())
        if len(upload.parts) < upload.begin.num_parts(self.part_bytes):
            raise UploadIncomplete(f"version {upload.begin.version} lacks parts")
        if commit.upload_digest not in (None, upload_digest(digest for _, digest in sorted(upload.digests.items()))):
            raise VersionConflict(f"version {upload.begin.version} has other parts")
        upload.commit, upload.state = commit, "committed"
        return JSONResponse(self.status(upload).model_dump(mode="json"))

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self.status(self._upload(request)).model_dump(mode="json"))

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"versions": [self.status(u).model_dump(mode="json") for u in self.uploads.values()]})

    async def _delete(self, request: Request) -> Response:
        del self.uploads[self._upload(request).begin.version]
        return Response(status_code=204)

    def _upload(self, request: Request) -> Upload:
        version = request.path_params["version"]
        if version not in self.uploads:
            raise NotFound(f"no version {version}")
        return self.uploads[version]

    def _status(self, upload: Upload) -> WeightStatus:
        state = "live" if upload.state == "committed" else "staged"
        return WeightStatus(
            version=upload.begin.version, label=upload.begin.label, state=state, total_bytes=upload.begin.nbytes
        )


async def forward(service: Service, request: httpx.Request) -> httpx.Response:
    """Let a service answer a request that came to a transport in the network's place."""
    content = await request.aread()
    again = httpx.Request(request.method, request.url, headers=request.headers, content=content)
    return await httpx.ASGITransport(service.app).handle_async_request(again)


def generate_reply(body: dict[str, Any]) -> dict[str, Any]:
    """Completions as the gateway spells them: tokens 7, 8, 9, the last of them by newer weights."""
    choice = {
        "token_ids": [7, 8, 9],
        "logprobs": [-t / 10 for t in (7, 8, 9)],
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }
    text = "prompt" in body
    reply = {
        "request_id": body.get("request_id", "made-up"),
        "model": "tiny",
        "created": 0,
        "choices": [
            {"index": index, **choice, **({"text": "789"} if text else {})}
            for index in range(body["sampling_params"].get("n", 1))
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
        "replica_id": "replica-1",
        "attempts": 2,
    }
    return reply | {"prompt_token_ids": [ord(c) for c in body["prompt"]]} if text else reply


def _with_more(reply: Any, *, is_map: bool = False) -> Any:
    """Return a reply with one more field in each of its objects, except maps."""
    if isinstance(reply, list):
        return [_with_more(value) for value in reply]
    if not isinstance(reply, dict):
        return reply
    fields = {name: _with_more(value, is_map=name == "digests") for name, value in reply.items()}
    return fields if is_map else fields | {"new_field": {"new": 1}}


def error_response(error: RolloutServiceError) -> Response:
    """As the gateway answers."""
    refused = error.retry_after_s is not None and not isinstance(error, TooEarly)
    headers = {"Retry-After": "0"} if refused else {}
    return JSONResponse(error.to_wire(), error.http_status, headers=headers)


async def until_disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def until_gone(accepted: asyncio.Event | threading.Event, gone: asyncio.Event | threading.Event) -> Handler:
    """A handler that waits instead of answering: it says when a request is here, and when its client has hung up."""

    async def hang(request: Request) -> Response:
        await request.body()
        accepted.set()
        await until_disconnected(request)
        gone.set()
        return Response()

    return hang


class Crowd:
    """Counts how many are inside at once, and lets nobody on before ``enough`` have come in."""

    def __init__(self, enough: int) -> None:
        self.most = 0
        self._enough, self._inside, self._there = enough, 0, asyncio.Event()

    async def __aenter__(self) -> None:
        self._inside += 1
        self.most = max(self.most, self._inside)
        if self._inside == self._enough:
            self._there.set()
        await self._there.wait()

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1


@contextmanager
def serving_in_a_thread(service: Service) -> Iterator[Service]:
    """Serve from another thread, for callers that block theirs."""
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def run() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        async with serving(service):
            ready.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait()
    try:
        yield service
    finally:
        stop[0]()
        thread.join()
