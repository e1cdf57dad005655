"""An ingest without Ray and engines, in a process of its own."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from rollout_service.config import ServiceConfig
from rollout_service.gateway.deployment import create_app
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.local import free_port
from rollout_service.web.auth import Authorizer
from tests.support.without_ray import services_of

PART_BYTES = 16 << 20


def serve_ingest(log: Path, folder: Path, port: int) -> None:
    """Run the ingest of the model in ``folder``, its upload listener, and the gateway's routes in front of it."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_ingest(log, folder, port))


async def _serve_ingest(log: Path, folder: Path, port: int) -> None:
    weights: dict[str, object] = {"root": log, "source_roots": [folder], "part_bytes": PART_BYTES}
    sections: dict[str, object] = {"model": {"path": folder / "model"}, "weights": weights}
    config = ServiceConfig.model_validate(sections)
    ingest, authorizer = Ingest(config), Authorizer(None)
    uploads = UploadServer(ingest, authorizer, "127.0.0.1")
    uploads.start()
    ingest.upload_address = UploadAddress(uploads.host, uploads.port)
    await ingest.start()
    async with httpx.AsyncClient() as http:
        await _serve(create_app(services_of(ingest, config, authorizer, http)), port)


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
