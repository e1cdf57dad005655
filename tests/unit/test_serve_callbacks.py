"""A proxy that has just started holds requests until it has its routes; without an application, it answers 503."""

import asyncio
import subprocess
import sys

import httpx
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from rollout_service.serve_callbacks import HoldUntilReady


class Proxy:
    """Answers as Serve's: 404 to everything before it has routes."""

    def __init__(self) -> None:
        self.has_routes, self.bodies, self.looks = False, list[bytes](), 0
        self.routes = {"/": "rollout"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200 if self.has_routes else 404
        if scope["path"] == "/-/healthz":
            self.looks += 1
            status = 200 if self.has_routes else 503
        elif scope["path"] == "/-/routes":
            await JSONResponse(self.routes)(scope, receive, send)
            return
        elif scope["path"] == "/missing" or not self.routes:
            status = 404
        elif self.has_routes:
            self.bodies.append((await receive())["body"])
        await PlainTextResponse(str(status), status)(scope, receive, send)


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
from rollout_service.serve_callbacks import in_proxy
in_proxy()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_proxy_may_open_as_many_files_as_the_hard_limit_allows():
    assert subprocess.check_output([sys.executable, "-c", FEW_FILES], text=True) == "4096\n"


async def test_requests_wait_for_routes_and_are_then_answered_whole():
    proxy = Proxy()
    transport = httpx.ASGITransport(HoldUntilReady(proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        asking = asyncio.create_task(http.post("/v1/completions", content=b"a prompt"))
        while proxy.looks < 2:
            await asyncio.sleep(0.01)
        assert (await http.get("/-/healthz")).status_code == 503
        proxy.has_routes = True
        assert (await asking).status_code == 200 and proxy.bodies == [b"a prompt"]
        looks = proxy.looks
        assert (await http.post("/v1/completions", content=b"another")).status_code == 200
        assert proxy.looks == looks


async def test_a_proxy_without_an_application_answers_503():
    proxy = Proxy()
    proxy.has_routes = True
    transport = httpx.ASGITransport(HoldUntilReady(proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        assert (await http.get("/missing")).text == "404"
        proxy.routes = {}
        answer = await http.post("/v1/completions", content=b"a prompt")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert answer.json()["error"]["type"] == "NotReady"
        assert "the service is ending, or not deployed yet" in answer.json()["error"]["message"]
        proxy.routes = {"/": "rollout"}
        assert (await http.post("/v1/completions", content=b"a prompt")).status_code == 200
