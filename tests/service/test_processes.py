"""Starting and stopping: ``serve run`` works by itself, and whatever way it ends, no process is left behind."""

import asyncio
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from rollout_service.local import free_port
from tests.support.processes import gone, marked, titles

PROJECT = Path(__file__).parents[2]
MARK = "ROLLOUT_SERVICE_TEST_RUN"
SERVE = str(Path(sys.executable).with_name("serve"))
GONE_S = 60.0
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_GONE_S = 120.0
"""They outlive a raylet that was killed: they try for up to 60 s to tell the GCS, which is dead, too, and end then."""

RUN_LOCALLY = """
import sys, time
from pathlib import Path
from rollout_service.local import running_service
with running_service(Path(sys.argv[1]), verbose=True) as service:
    print("the block has begun", flush=True)
    time.sleep(600)
"""
READY = "the block has begun"
SAID = "taking parts at http://", "is empty: version 0 is made from", "version 0: staged"


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    """The shipped CPU deployment on a free port; its relative paths are below ``tmp_path``."""
    config = yaml.safe_load((PROJECT / "deployments/cpu_rollout.yaml").read_text())
    config["http_options"]["port"] = free_port()
    path = tmp_path / "cpu_rollout.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_serve_run_makes_its_model_serves_and_leaves_nothing_after_ctrl_c(
    deployment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = _mark(monkeypatch)
    process = await asyncio.create_subprocess_exec(SERVE, "run", str(deployment), cwd=deployment.parent)
    port = yaml.safe_load(deployment.read_text())["http_options"]["port"]
    body = {"prompt": "1+1=", "max_tokens": 4}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        await _healthy(http, process)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert (deployment.parent / "models/tiny-qwen3/model.safetensors").is_file()
    process.send_signal(signal.SIGINT)
    await process.wait()
    await _nothing_is_left(mark)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="ctrl-c while it starts", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="kill -9"),
    ],
)
async def test_a_local_service_says_what_it_does_and_leaves_nothing_behind(
    how: signal.Signals, deployment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, said = _mark(monkeypatch), deployment.with_name("output")
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN_LOCALLY, str(deployment), cwd=deployment.parent, stdout=output, stderr=output
        )
    if how == signal.SIGINT:
        await _until(lambda: any(title.startswith("VLLM::EngineCore") for title in titles(MARK, mark)), process)
    else:
        await _until(lambda: all(line in said.read_text() for line in (READY, *SAID)), process)
    assert len(marked(MARK, mark)) > 5
    process.send_signal(how)
    await process.wait()
    await _nothing_is_left(mark)


def _mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value that every process started from now on inherits."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    return mark


async def _until(reached: Callable[[], bool], process: asyncio.subprocess.Process) -> None:
    while not reached():
        assert process.returncode is None, "the service ended early"
        await asyncio.sleep(0.5)


async def _nothing_is_left(mark: str) -> None:
    """Of the service, within a minute; Ray's agents end by themselves, be it later."""
    assert await gone(MARK, mark, within_s=GONE_S, besides=RAYS_AGENTS) == []
    assert await gone(MARK, mark, within_s=AGENTS_GONE_S) == []


async def _healthy(http: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    while True:
        assert process.returncode is None, "serve run ended before it was healthy"
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
