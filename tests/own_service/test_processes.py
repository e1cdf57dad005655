"""Whatever way a local service ends, no process is left; for ``serve run`` see test_serve_run.py."""

import asyncio
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rollout_service.local import free_port
from tests.support.processes import MARK, gone, marked, titles

PROJECT = Path(__file__).parents[2]
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_GONE_S = 120.0
"""They outlive a raylet that was killed: they try for up to 60 s to tell the GCS, which is dead, too, and end then.
Nobody waits for them here: it is looked for them when all tests are over."""

RUN_LOCALLY = """
import sys, time
from pathlib import Path
from rollout_service.local import running_service
with running_service(Path(sys.argv[1]), verbose=True) as service:
    print("the block has begun", flush=True)
    time.sleep(600)
"""
READY = "the block has begun"


@pytest.fixture(scope="session")
def ended() -> Iterator[list[str]]:
    """The marks of services that have ended: when all tests are over, no process that has one is left."""
    marks: list[str] = []
    yield marks
    for mark in marks:
        assert asyncio.run(gone(mark, within_s=AGENTS_GONE_S)) == []


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    """The shipped CPU deployment on a free port; its relative paths are below ``tmp_path``."""
    config = yaml.safe_load((PROJECT / "deployments/cpu_rollout.yaml").read_text())
    config["http_options"]["port"] = free_port()
    path = tmp_path / "cpu_rollout.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("how", "while_it_starts"),
    [
        pytest.param(signal.SIGKILL, True, id="kill -9 while it starts"),
        pytest.param(signal.SIGKILL, False, id="kill -9"),
        pytest.param(signal.SIGINT, True, id="ctrl-c while it starts"),
    ],
)
async def test_a_local_service_leaves_nothing_behind(how, while_it_starts, deployment, monkeypatch, ended):
    mark, output = uuid.uuid4().hex, deployment.with_name("output")
    monkeypatch.setenv(MARK, mark)  # every process started from now on inherits it
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN_LOCALLY, str(deployment), cwd=deployment.parent, stdout=file, stderr=file
        )
    if while_it_starts:
        await _until(lambda: any(title.startswith("VLLM::EngineCore") for title in titles(mark)), process)
        assert READY not in output.read_text()
    else:
        await _until(lambda: READY in output.read_text(), process)
    assert len(marked(mark)) > 5
    process.send_signal(how)
    await process.wait()
    ended.append(mark)
    assert await gone(mark, besides=RAYS_AGENTS) == []


async def _until(reached: Callable[[], bool], process: asyncio.subprocess.Process) -> None:
    while not reached():
        assert process.returncode is None, "the service ended early"
        await asyncio.sleep(0.5)
