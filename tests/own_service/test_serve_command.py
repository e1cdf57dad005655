"""``rollout-service serve`` with a model of the hub: it downloads it, says how to call it, and ends by Ctrl-C."""

import asyncio
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rollout_service.local import free_port
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.store.log import WeightLog
from tests.support.hub_server import hub_server
from tests.support.processes import MARK, gone

REPO = "some-org/tiny-qwen3"
COMMAND = str(Path(sys.executable).with_name("rollout-service"))


@dataclass(frozen=True)
class Served:
    """What the command runs."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    commit: str
    mark: str

    @functools.cached_property
    def log(self) -> Path:
        """Return the folder of the log, which lies in memory."""
        return log_of(self.port)

    @property
    def said(self) -> str:
        """All that it and its processes have written."""
        return (self.folder / "output").read_text()


@contextmanager
def started(folder: Path, environment: Sequence[str], model: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in ``folder`` until the block ends; the block begins once it serves."""
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*environment, COMMAND, "serve", model, "--port", str(port)], cwd=folder, stdout=file, stderr=file
        )
    try:
        while "Ctrl-C ends it." not in output.read_text():
            assert process.poll() is None, output.read_text()
            time.sleep(0.5)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def log_of(port: int) -> Path:
    """Return the folder of the log, as the service at ``port`` tells it."""
    return Path(httpx.get(f"http://127.0.0.1:{port}/v1/fleet").json()["log"]["root"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, mark, port = tmp_path_factory.mktemp("serve"), uuid.uuid4().hex, free_port()
    make_tiny_qwen3(folder / "published")
    with hub_server() as hub:
        commit = hub.publish(REPO, folder / "published")
        with started(folder, hub.env(folder / "hf", **{MARK: mark}), REPO, port) as process:
            served = Served(process, folder, port, commit, mark)
            assert served.log.is_dir()
            yield served
        shutil.rmtree(served.log)


def test_what_it_prints_works(served):
    lines = served.said.splitlines()
    [curl] = [line for line in lines if line.startswith("    curl ")]
    answer = subprocess.run(["sh", "-c", curl], check=True, capture_output=True).stdout
    assert len(json.loads(answer)["choices"][0]["text"]) > 0
    first = lines.index("    from rollout_service.client import SyncRolloutClient")
    code = "\n".join(line.removeprefix("    ") for line in lines[first : first + 3])
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip()


def test_it_serves_the_commit_of_the_hub(served):
    [model] = httpx.get(f"http://127.0.0.1:{served.port}/v1/models").json()["data"]
    assert model["id"] == REPO
    assert WeightLog(served.log).manifest(0).fingerprint.endswith(f"@{served.commit}")
    assert f"{REPO}: downloading 1 files, " in served.said


def test_a_second_one_is_refused(served):
    command = [COMMAND, "serve", served.folder / "published", "--port", str(served.port)]
    second = subprocess.run(command, cwd=served.folder, capture_output=True, text=True, check=False)
    assert second.returncode == 1 and f"port {served.port}: taken by another process" in second.stderr


async def test_ctrl_c_ends_it_and_leaves_nothing(served):
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait() == 0
    assert served.said.rstrip().endswith("stopped")
    assert "killed by `ray.kill`" not in served.said, "a warning that says nothing to a user"
    assert await gone(served.mark) == []


async def test_ctrl_c_during_the_start_ends_it_and_leaves_nothing(tmp_path):
    make_tiny_qwen3(tmp_path / "model")
    mark, output = uuid.uuid4().hex, tmp_path / "output"
    command = ["env", f"{MARK}={mark}", COMMAND, "serve", "model", "--port", str(free_port())]
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file)
    while "vLLM starts" not in output.read_text():
        assert process.poll() is None, output.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    said = output.read_text()
    assert said.rstrip().endswith("stopped")
    assert "killed by `ray.kill`" not in said, "a warning that says nothing to a user"
    assert await gone(mark) == []
    shutil.rmtree(said.partition("weights in ")[2].partition(";")[0])


async def test_sigterm_answers_what_is_open_and_leaves_nothing(tmp_path):
    make_tiny_qwen3(tmp_path / "model")
    mark, port = uuid.uuid4().hex, free_port()
    with started(tmp_path, ["env", f"{MARK}={mark}"], "model", port) as process:
        log = log_of(port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
            (await http.post("/pause")).raise_for_status()  # what is asked for now is never answered
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4}))
            while not (await http.get("/v1/fleet")).json()["replicas"][0]["running"]:
                await asyncio.sleep(0.2)
            process.terminate()
            answer = await asking
        status = await asyncio.to_thread(process.wait)
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert "this gateway ends before" in answer.json()["error"]["message"]
    assert status == 128 + signal.SIGTERM
    assert await gone(mark) == []
    shutil.rmtree(log)
