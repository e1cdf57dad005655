"""Serves an application over HTTP in the running event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI

from tests.support.certificates import Certificate


@dataclass
class App:
    """An application, and its address once it is served."""

    app: FastAPI
    url: str = ""


class Served(Protocol):
    """An ASGI application, and where it is to be found."""

    app: Any
    url: str


AnyServed = TypeVar("AnyServed", bound=Served)


@asynccontextmanager
async def serving(service: AnyServed, certificate: Certificate | None = None) -> AsyncIterator[AnyServed]:
    """Serve on a free port of this machine, in the running event loop. ``certificate``: None: plain HTTP."""
    # asyncio turns Nagle's algorithm off only on a socket that names its protocol; with it on, a reply takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)  # connections queue from here on: no wait for the start
        files: dict[str, Any] = {} if certificate is None else dict(certificate.files)
        scheme = "https" if files else "http"
        service.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        # Server.serve() without its loop, which looks for signals, and for the end, ten times a second.
        config = uvicorn.Config(service.app, log_level="warning", lifespan="off", **files)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            yield service
        finally:
            for open_socket in server.servers:
                open_socket.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            for unanswered in server.server_state.tasks:  # of a test that failed
                unanswered.cancel()
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
