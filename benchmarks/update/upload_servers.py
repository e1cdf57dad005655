"""The processes that ``benchmarks.update.upload`` sends to: the ingest without Ray and engines, and bare receivers."""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request

from benchmarks.update.gpu_trace import add_gpu_trace
from benchmarks.update.plain_sockets import receive_for_ever
from rollout_service.config import ServiceConfig
from rollout_service.gateway.deployment import create_app
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.local import free_port
from rollout_service.web.auth import Authorizer
from tests.support.without_ray import services_of

PART_BYTES = 16 << 20


def serve_ingest(log: Path, folder: Path, port: int, *, on_gpu: bool = False) -> None:
    """The ingest of the model in ``folder``, its upload listener, and the gateway's routes in front of it.

    ``on_gpu``: it quantizes there, and its GPU can be watched (``gpu_trace.py``).
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_ingest(log, folder, port, on_gpu))


async def _serve_ingest(log: Path, folder: Path, port: int, on_gpu: bool) -> None:
    weights: dict[str, object] = {"root": log, "source_roots": [folder], "part_bytes": PART_BYTES}
    sections: dict[str, object] = {"model": {"path": folder / "model"}, "weights": weights}
    if on_gpu:
        weights["ingest_num_gpus"], sections["quant"] = 1.0, {"device": "cuda"}
    config = ServiceConfig.model_validate(sections)
    ingest, authorizer = Ingest(config), Authorizer(None)
    uploads = UploadServer(ingest, authorizer, "127.0.0.1")
    uploads.start()
    ingest.upload_address = UploadAddress(uploads.host, uploads.port)
    await ingest.start()
    async with httpx.AsyncClient() as http:
        app = create_app(services_of(ingest, config, authorizer, http))
        if on_gpu:
            add_gpu_trace(app)
        await _serve(app, port)


def serve_bare(folder: Path, port: int) -> None:
    """A PUT that writes its body into a new file and syncs it, and nothing else; and plain sockets, on another port."""
    app = FastAPI()
    plain = socket.create_server(("127.0.0.1", 0), backlog=64)
    threading.Thread(target=receive_for_ever, args=(plain,), daemon=True).start()

    @app.get("/plain")
    async def plain_port() -> int:
        return int(plain.getsockname()[1])

    @app.put("/{push}/{part}")
    async def put(push: int, part: int, request: Request) -> int:
        target = folder / "bare" / f"{push:06d}"
        target.mkdir(parents=True, exist_ok=True)
        with (target / str(part)).open("xb", buffering=0) as stream:
            async for chunk in request.stream():
                stream.write(chunk)
            await asyncio.to_thread(os.fsync, stream.fileno())
        return part

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(app, port))


async def _serve(app: FastAPI, port: int) -> None:
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False)).serve()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return uvicorn.Config("").get_loop_factory()  # uvloop where it is installed, as under Ray


@contextmanager
def process(target: Callable[[Path, int], None], folder: Path) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and process id, once it answers."""
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(target=target, args=(folder, port), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.TransportError:
                if not server.is_alive():
                    raise
                time.sleep(0.2)
        yield url, server.pid or 0
    finally:
        server.terminate()
        server.join()
