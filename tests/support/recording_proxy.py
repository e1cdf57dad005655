"""Stands between a client and a service, hands everything on, and keeps what was asked and answered, and when."""

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.serving import serving

_PER_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True)
class Exchange:
    """One request that was answered. A reply that is no JSON has its text alone."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int
    reply: dict[str, Any]
    began: float
    ended: float
    """Both on one clock, in seconds."""


class RecordingProxy:
    """Its ``app`` hands requests on to ``target``; those whose path ``recorded`` matches are kept in ``exchanges``."""

    def __init__(self, target: str, recorded: str) -> None:
        self.url = ""
        self.exchanges: list[Exchange] = []
        self._target, self._recorded = target, re.compile(recorded)
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self.app = Starlette(routes=[Route("/{path:path}", self._hand_on, methods=["GET", "POST", "PUT", "DELETE"])])

    async def _hand_on(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        began = time.perf_counter()
        reply = await self._http.request(
            request.method,
            self._target + path,
            params=request.query_params,
            content=body,
            headers=_without_hop_by_hop(request.headers.items()),
        )
        if self._recorded.fullmatch(path):
            is_json = "json" in reply.headers.get("content-type", "")
            answer = reply.json() if is_json else {"text": reply.text}
            exchange = Exchange(
                path, dict(request.headers), json.loads(body), reply.status_code, answer, began, time.perf_counter()
            )
            self.exchanges.append(exchange)
        headers = _without_hop_by_hop(reply.headers.items())
        headers.pop("content-encoding", None)  # httpx has decoded it
        return Response(reply.content, reply.status_code, headers)

    async def aclose(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def recording_proxy(target: str, recorded: str) -> AsyncIterator[RecordingProxy]:
    """A proxy in this event loop; its address is ``url``."""
    proxy = RecordingProxy(target, recorded)
    try:
        async with serving(proxy):
            yield proxy
    finally:
        await proxy.aclose()


def _without_hop_by_hop(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _PER_CONNECTION}
