import asyncio
import errno
import subprocess
import sys

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.runtime.connections import OTHER_FILES, ManyConnections, too_many_open_files


async def test_connections_are_opened_only_as_far_as_they_are_needed(service, client):
    for _ in range(3):
        await client.generate([1])
    assert len(set(service.client_ports)) == 1
    await client.generate_batch([[i] for i in range(9)], concurrency=3)
    await client.generate_batch([[i] for i in range(9)], concurrency=2)
    assert len(set(service.client_ports)) == 3


FEW_FILES = """
import logging, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from rollout_service.runtime.connections import affordable_connections
logging.basicConfig(format="%(message)s", stream=sys.stdout)
print(affordable_connections(1024), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def affordable(soft: int, hard: int) -> tuple[int, int, str]:
    """Connections of a process with these limits, its soft limit afterwards, and its warning."""
    output = subprocess.check_output([sys.executable, "-c", FEW_FILES, str(soft), str(hard)], text=True)
    *warning, numbers = output.splitlines()
    connections, soft_after = map(int, numbers.split())
    return connections, soft_after, " ".join(warning)


def test_the_soft_limit_of_open_files_is_raised_and_a_low_hard_limit_is_named():
    connections, soft, warning = affordable(1024, 4096)
    assert connections == 1024 and 1024 + OTHER_FILES < soft < 4096 and not warning
    connections, soft, warning = affordable(512, 1000)
    assert 1 < connections < 1000 - OTHER_FILES and soft == 1000
    assert "1000 open files" in warning and "ulimit -Hn" in warning


def test_too_many_open_files_are_told_from_a_service_that_is_away():
    refused = OSError(errno.ECONNREFUSED, "refused")
    full = httpx.ConnectError("no")
    full.__cause__ = ExceptionGroup("all attempts failed", [refused, OSError(errno.EMFILE, "too many")])
    assert "ulimit -n" in str(too_many_open_files(full))
    assert too_many_open_files(httpx.ConnectError("no")) is None and too_many_open_files(refused) is None


@pytest.mark.parametrize("warm", [False, True], ids=["on a new connection", "on one that is idle"])
async def test_a_request_cancelled_at_any_moment_frees_its_connection(service, warm):
    url, cancelled = f"{service.url}/inference/v1/generate", 0
    for moment in range(40):  # turns of the event loop: connecting and sending take some twenty
        async with httpx.AsyncClient(transport=ManyConnections(1), timeout=httpx.Timeout(10, pool=None)) as client:
            if warm:
                await client.get(f"{service.url}/v1/weights")
            request = asyncio.create_task(client.post(url, json={"prompt_token_ids": [1]}))
            for _ in range(moment):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
            cancelled += request.cancelled()
            async with asyncio.timeout(10):
                assert (await client.get(f"{service.url}/v1/weights")).status_code == 200, moment
    assert cancelled > 5


async def test_a_connection_is_busy_until_its_reply_is_closed_and_used_again_if_that_was_read(service):
    url = f"{service.url}/v1/weights"
    async with httpx.AsyncClient(transport=ManyConnections(2)) as client:
        await client.get(url)
        async with client.stream("GET", url):  # not read
            await client.get(url)  # beside it
        await client.get(url)
    first, again, beside, last = service.client_ports
    assert first == again != beside == last


async def test_an_error_reply_of_a_stream_that_breaks_off_frees_its_connection():
    asked = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[:2])
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100\r\n\r\nthe first")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server, asyncio.timeout(30):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RolloutClient(url, max_connections=1, retries=1) as client:
            with pytest.raises(httpx.RemoteProtocolError, match="the connection kept failing"):
                await client.generate_stream([1]).open()
    assert asked == [[b"POST", b"/inference/v1/generate"]] * 2


async def test_requests_without_a_file_wait_for_a_connection(service, monkeypatch):
    tried = []

    class NoFile(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            tried.append(request)
            raise httpx.ConnectError("no") from OSError(errno.EMFILE, "too many")

    transport = ManyConnections(8)
    async with httpx.AsyncClient(transport=transport) as client:
        async with client.stream("GET", f"{service.url}/v1/weights") as reply:
            monkeypatch.setattr(httpx, "AsyncHTTPTransport", NoFile)
            waiting = [asyncio.create_task(client.get(f"{service.url}/v1/weights")) for _ in range(3)]
            while len(tried) < 3:
                await asyncio.sleep(0)
            await reply.aread()
        assert [(await task).status_code for task in waiting] == [200] * 3
    async with httpx.AsyncClient(transport=ManyConnections(8)) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{service.url}/v1/weights")


async def test_a_refused_connection_makes_room_for_the_next(service):
    transport = ManyConnections(1)
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:9")
        assert (await client.get(f"{service.url}/v1/weights")).status_code == 200


def test_no_connections_at_all_are_refused():
    with pytest.raises(ValueError, match="max_connections=0"):
        RolloutClient("http://service", max_connections=0)
