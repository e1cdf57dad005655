"""A deployment that can never start says why: over HTTP while Serve still tries, and where it was started."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rollout_service.local import free_port

PROJECT = Path(__file__).parents[2]
LONG_S = 500
_RUN = """
import json, sys
from pathlib import Path
from rollout_service.local import running_service
with running_service(Path(sys.argv[1]), json.loads(sys.argv[2]), port=int(sys.argv[3]), verbose=True):
    pass
"""
NO_ROOM = r"ValueError: Available memory on node .* less than requested memory for kv"
"""What vLLM's worker raises, two processes below the replica, for a KV cache of a million GiB."""


@asynccontextmanager
async def started(overrides: dict[str, dict[str, Any]], output: Path) -> AsyncIterator[tuple[str, Any]]:
    """The shipped CPU deployment with ``overrides``: its URL, and the process, whose output goes to a file."""
    port = free_port()
    arguments = [str(PROJECT / "deployments/cpu_rollout.yaml"), json.dumps(overrides), str(port)]
    with output.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _RUN, *arguments, cwd=PROJECT, stdout=stream, stderr=stream
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def reason(url: str, process: Any, says: str) -> dict[str, Any]:
    """What ``GET /health`` says as soon as its message has ``says``; before, that a replica takes long to start."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while process.returncode is None:
            try:
                reply = await http.get("/health")
            except httpx.TransportError:  # the gateway is not there yet
                await asyncio.sleep(0.2)
                continue
            error: dict[str, Any] = reply.json()["error"] if reply.status_code == 503 else {"message": ""}
            if re.search(says, error["message"], re.DOTALL):
                return error
            await asyncio.sleep(0.2)
    raise AssertionError("the service ended before /health said why")


def overrides(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {"model": {"path": str(tmp_path / "tiny")}, "weights": {"root": str(tmp_path / "weights"), "poll_s": 1.0}}


async def test_vllms_start_error_reaches_health_and_the_terminal(tmp_path):
    without_room = overrides(tmp_path) | {"engine": {"cpu_kv_cache_gib": 1_000_000}}
    output = tmp_path / "output"
    async with started(without_room, output) as (url, process), asyncio.timeout(LONG_S):
        said = await reason(url, process, rf"no engine replica is live: .* first .* with: .*{NO_ROOM}")
        assert said["type"] == "NotReady" and said["detail"]["failed_starts"]["tries"] >= 1
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            fleet = (await http.get("/v1/fleet")).json()
        assert re.search(NO_ROOM, fleet["failed_starts"]["first"]["reason"])
        assert await process.wait() == 1
    written = output.read_text()
    assert re.search(rf"engine replica \S+ could not start: .*{NO_ROOM}", written), "while it was being tried"
    assert re.search(rf"ServiceNotStarted: .*{NO_ROOM}", written), "once Serve had given up"


async def test_an_ingest_that_cannot_start_is_told_with_serves_words(tmp_path):
    root = tmp_path / "weights"
    root.mkdir()
    (root / "LATEST").write_text("no JSON")
    output = tmp_path / "output"
    async with started(overrides(tmp_path), output) as (url, process), asyncio.timeout(LONG_S):
        await reason(url, process, r"Serve says of .*ingest: .*LATEST")
        assert await process.wait() == 1
    assert re.search(r"ServiceNotStarted: .*ingest: .*LATEST", output.read_text())
