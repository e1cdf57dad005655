"""``serve run`` works by itself, says what it does and ends by Ctrl-C."""

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from rollout_service.local import free_port
from tests.support.processes import gone

DEPLOYMENT = Path(__file__).parents[2] / "deployments/cpu_rollout.yaml"
SERVE = str(Path(sys.executable).with_name("serve"))
MARK = "ROLLOUT_SERVICE_TEST_RUN"
GONE_S = 60.0
OUTPUT = "output"
SAID = "taking parts on 127.0.0.1, port", "is empty: version 0 is made from", "version 0: staged"


@dataclass(frozen=True)
class Served:
    """What ``serve run`` runs."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    """In which it was started."""
    mark: str
    """Value of ``MARK`` in the environment of all its processes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The shipped CPU deployment in an empty folder."""
    folder, mark, port = tmp_path_factory.mktemp("serve-run"), uuid.uuid4().hex, free_port()
    config = yaml.safe_load(DEPLOYMENT.read_text())
    config["http_options"]["port"] = port
    (folder / "deployment.yaml").write_text(yaml.safe_dump(config))
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            ["env", f"{MARK}={mark}", SERVE, "run", "deployment.yaml"], cwd=folder, stdout=output, stderr=output
        )
    try:
        while not _healthy(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, "serve run ended before it was healthy"
            time.sleep(0.5)
        yield Served(process, f"http://127.0.0.1:{port}", folder, mark)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


async def test_serve_run_makes_its_model_and_serves(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4})).status_code == 200
    assert (served.folder / "models/tiny-qwen3/model.safetensors").is_file()
    said = (served.folder / OUTPUT).read_text()
    assert [line for line in SAID if line not in said] == []


async def test_ctrl_c_ends_serve_run_and_leaves_nothing(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(served.process.wait)
    assert await gone(MARK, served.mark, within_s=GONE_S) == []
