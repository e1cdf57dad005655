"""A trainer as the ingest meets it: begins through the ingest, sends parts to its upload application, commits."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import torch
import xxhash
from safetensors.torch import load_file

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.protocol.fleet import PauseMode, ReplicaStatus
from rollout_service.protocol.upload import (
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    BeginUpload,
    CommitUpload,
    UploadPlan,
    UploadTensor,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.upload_record import JOURNAL

Weights = Mapping[str, torch.Tensor]
PART_BYTES = 128 << 10
"""Small parts, so that a small model has several."""

Start = Callable[..., Awaitable[Ingest]]
"""Starts an ingest of a model, with a log at a folder; see the fixture ``start``."""
Restart = Callable[..., Awaitable[Ingest]]
"""Ends an ingest and starts another on the same log; see the fixture ``restarted``."""


@asynccontextmanager
async def started(config: ServiceConfig) -> AsyncIterator[Ingest]:
    """Run an ingest until the block ends."""
    ingest = Ingest(config)
    await ingest.start()
    try:
        yield ingest
    finally:
        await ingest.stop()


def config_of(model: Path, root: Path, **sections: dict[str, object]) -> ServiceConfig:
    """The configuration of a service with its log at ``root``."""
    weights = {"root": root, "part_bytes": PART_BYTES, "lock_wait_s": 0.2, **sections.pop("weights", {})}
    return ServiceConfig.model_validate({"model": {"path": model}, "weights": weights, **sections})


def folder_weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model folder."""
    return load_file(model / "model.safetensors")


def changed(weights: Weights, by: float) -> dict[str, torch.Tensor]:
    """Other weights of the same model."""
    return {name: (tensor + by).to(tensor.dtype) for name, tensor in weights.items()}


def scattered(weights: Weights, seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    """Other weights: a share of the elements of each tensor is changed by some percent."""
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        hit = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(hit, tensor.float() * 1.07 + 1e-4, tensor.float()).to(tensor.dtype)
    return new


def begin_of(version: int, weights: Weights, kv_scales: dict[str, float] | None = None) -> BeginUpload:
    """The tensor table of an upload, and the scales that go with it."""
    table = [
        UploadTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))  # type: ignore[arg-type]
        for name, tensor in weights.items()
    ]
    return BeginUpload(version=version, tensors=tuple(table), kv_scales=kv_scales)


def stream_of(weights: Weights) -> bytes:
    """All bytes of an upload."""
    return b"".join(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in weights.values())


def parts_of(weights: Weights, part_bytes: int = PART_BYTES) -> list[bytes]:
    """All parts of an upload."""
    stream = stream_of(weights)
    return [stream[start : start + part_bytes] for start in range(0, len(stream), part_bytes)]


def journal_of(parts: Path) -> list[str]:
    """Return the lines about received parts in a staged version's folder."""
    journal = parts / JOURNAL
    return journal.read_text().splitlines() if journal.exists() else []


class Listener(httpx.AsyncBaseTransport):
    """Each request has a listener of its own, which has ended, with its threads, when the request has.

    Those made while it is ``kept`` share one.
    """

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest
        self._open: tuple[UploadServer, httpx.AsyncHTTPTransport] | None = None

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """One listener, and connections to it, until the block ends."""
        async with self._listening() as self._open:
            try:
                yield
            finally:
                self._open = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._open is not None:
            return await _answer(request, *self._open)
        async with self._listening() as (server, transport):
            return await _answer(request, server, transport)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[tuple[UploadServer, httpx.AsyncHTTPTransport]]:
        server = UploadServer(self._ingest, "127.0.0.1")
        server.start()
        try:
            async with httpx.AsyncHTTPTransport(verify=False) as transport:  # there is no TLS to be prepared for
                yield server, transport
        finally:
            await server.stop()


async def _answer(request: httpx.Request, server: UploadServer, transport: httpx.AsyncHTTPTransport) -> httpx.Response:
    request.url = request.url.copy_with(port=server.port)
    response = await transport.handle_async_request(request)
    await response.aread()
    return httpx.Response(response.status_code, headers=response.headers, content=response.content)


class Trainer:
    """Pushes versions into ``ingest``."""

    def __init__(self, ingest: Ingest) -> None:
        self._listener = Listener(ingest)
        self._address = ingest.upload_address = ingest.upload_address or UploadAddress("127.0.0.1", 7000)
        self.http = httpx.AsyncClient(
            transport=self._listener,
            base_url="http://127.0.0.1",
            headers={UPLOAD_KEY_HEADER: self._address.key(1)},
            timeout=None,
        )
        """Has the key of version 1."""
        self._ingest = ingest

    async def put(
        self, version: int, part: int, data: bytes, digest: str | None = None, **headers: str
    ) -> httpx.Response:
        """One part with its own digest, or a given one."""
        headers[PART_DIGEST_HEADER] = digest or xxhash.xxh3_128_hexdigest(data)
        headers.setdefault(UPLOAD_KEY_HEADER, self._address.key(version))
        return await self.http.put(f"/v1/weights/{version}/parts/{part}", content=data, headers=headers)

    async def upload(
        self,
        version: int,
        weights: Weights,
        order: Iterable[int] | None = None,
        kv_scales: dict[str, float] | None = None,
    ) -> UploadPlan:
        """Begin, and send the parts in ``order`` (all of them by default)."""
        plan = await self._ingest.begin(begin_of(version, weights, kv_scales))
        await self.send(plan, parts_of(weights, plan.part_bytes), order)
        return plan

    async def send(
        self, plan: UploadPlan, parts: Sequence[bytes], order: Iterable[int] | None = None, **headers: str
    ) -> None:
        """Those of the upload's parts in ``order``; by default those that are missing."""
        async with self._listener.kept():
            for part in plan.missing_parts if order is None else order:
                reply = await self.put(plan.version, part, parts[part], **headers)
                assert reply.status_code == 200, reply.text

    async def push(self, version: int, weights: Weights, kv_scales: dict[str, float] | None = None) -> WeightStatus:
        """Upload and commit."""
        await self.upload(version, weights, kv_scales=kv_scales)
        return await self._ingest.commit(version, CommitUpload())


def replica(name: str, version: int | None, sequence: int = 0, **fields: object) -> ReplicaStatus:
    """What a live replica reports."""
    return ReplicaStatus.model_validate(
        {"replica_id": name, "version": version, "state": "ready", "sequence": sequence, **fields}
    )


@contextmanager
def untouched_files(folder: Path) -> Iterator[None]:
    """Open files of which one gets the number of a descriptor that was closed: nothing is written into any of them."""
    others = [(folder / f"other-{number}").open("wb") for number in range(8)]
    yield
    for file in others:
        file.close()
    assert [Path(file.name).read_bytes() for file in others] == [b""] * 8


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def open_files() -> int:
    """Files and folders that this process has open; those that earlier tests left to the garbage collector are closed.

    Not sockets and pipes: those of event loops and test workers come and go.
    """
    gc.collect()
    return sum(target.startswith("/") for target in map(_target, Path("/proc/self/fd").iterdir()))


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # that of the listing itself
        return ""


async def order(ingest: Ingest, paused: bool, mode: PauseMode = "keep") -> str:
    """Have one replica, "a", obey a pause or resume. Returns the order."""
    before = await ingest.sync(replica("a", 0), None)
    asking = asyncio.create_task(ingest.set_paused(paused, mode, 60.0))
    desired = await ingest.sync(replica("a", 0), before)
    await ingest.report(replica("a", 0, paused=paused, obeyed=desired.order))
    await asking
    return desired.order
