"""The service as `rollout-service serve FOLDER` starts it, with random weights of a published shape."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common.command import Options
from benchmarks.common.gpu_service import write_weights
from benchmarks.common.processes import ROLLOUT_SERVICE, is_healthy
from benchmarks.common.shapes import Shape, write_config
from rollout_service.client import SyncRolloutClient
from rollout_service.model.tiny import make_tiny_qwen3

START_LIMIT_S = 600
_END_S = 60
_SERVE_RUN = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run"]


class ServedOptions(Options):
    """The model and its service."""

    model: str = Shape.QWEN3_8B.value
    """A published shape, or tiny."""
    folder: Path = Path(tempfile.gettempdir()) / "shipped-models"
    """Where weights are put; those of an earlier run are used again."""
    tensor_parallel: int = 1
    """GPUs of a replica."""
    gpu_share: float | None = None
    """engine.gpu_memory_utilization; the shipped one if not given."""
    port: int = 8000

    def model_folder(self) -> Path:
        """Return the model's folder; its random weights are written if it has none."""
        here = self.folder / self.model
        if not any(here.glob("*.safetensors")):
            if self.model == "tiny":
                make_tiny_qwen3(here)
            else:
                write_weights(write_config(Shape(self.model), here))
                torch.cuda.empty_cache()
        return here


def shipped_arguments(served: ServedOptions, replicas: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return what `rollout-service serve MODEL` deploys, as Serve's configuration."""
    command = [*ROLLOUT_SERVICE, "serve", str(served.model_folder()), "--port", str(served.port)]
    command += ["--replicas", replicas, "--tp", str(served.tensor_parallel), "--print-config"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    document: dict[str, Any] = yaml.safe_load(printed)
    args = document["applications"][0]["args"]
    for section, settings in sections.items():
        args[section] = args.get(section, {}) | settings
    if served.gpu_share is not None:
        args["engine"]["gpu_memory_utilization"] = served.gpu_share
    return document


@contextmanager
def shipped_service(
    served: ServedOptions, replicas: str, **sections: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run ``rollout-service serve MODEL`` until the block ends; yield its URL, and how long its start took."""
    document = shipped_arguments(served, replicas, **sections)
    deployment = served.folder / "deployment.yaml"
    deployment.write_text(yaml.safe_dump(document))
    url, started = f"http://127.0.0.1:{served.port}", time.monotonic()
    with (served.folder / "serve.log").open("w") as log:
        # a session of its own: Ctrl-C ends this process first, which then ends the service
        service = subprocess.Popen(
            [*_SERVE_RUN, str(deployment)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(url, service, started)
        yield url, {"start_s": round(time.monotonic() - started, 1)}
    finally:
        service.send_signal(signal.SIGINT)
        try:
            service.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)


def wait_until_ready(client: SyncRolloutClient, replicas: int, before: frozenset[str] = frozenset()) -> float:
    """Return the seconds until so many replicas are ready, at least one of them not in ``before``."""
    started = time.monotonic()
    while True:
        ready = {replica.replica_id for replica in client.fleet().replicas if replica.state == "ready"}
        if len(ready) == replicas and ready - before:
            return round(time.monotonic() - started, 1)
        if time.monotonic() - started > START_LIMIT_S:
            raise RuntimeError(f"{len(ready)} of {replicas} replicas are ready: the service's output is in serve.log")
        time.sleep(0.25)


def _wait(url: str, service: subprocess.Popen[bytes], started: float) -> None:
    """Return once the service answers. Raises RuntimeError if it ends, or takes longer than ten minutes."""
    while not is_healthy(url):
        if service.poll() is not None or time.monotonic() - started > START_LIMIT_S:
            raise RuntimeError("the service did not start: its output is in serve.log")
        time.sleep(0.5)
