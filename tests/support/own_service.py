"""A service in a process of its own, for tests that need another configuration than the session's."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from rollout_service.local import free_port

PROJECT = Path(__file__).parents[2]

_RUN = """
import json, sys, time
from pathlib import Path
from rollout_service.local import running_service
with running_service(Path(sys.argv[1]), json.loads(sys.argv[2]), port=int(sys.argv[3])):
    print("ready", flush=True)
    time.sleep(3600)
"""


@asynccontextmanager
async def own_service(overrides: dict[str, dict[str, Any]]) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The shipped CPU deployment with ``overrides``: its URL once its engines run, and the process it is below."""
    port = free_port()
    arguments = [str(PROJECT / "deployments/cpu_rollout.yaml"), json.dumps(overrides), str(port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUN, *arguments, cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        while (line := await process.stdout.readline()) != b"ready\n":
            assert line, "the service ended before it was ready"
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()
