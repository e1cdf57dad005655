"""The service as `rollout-service serve FOLDER` starts it, with random weights of a published shape."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.gpu_service import ModelOptions
from benchmarks.common.processes import ROLLOUT_SERVICE, is_healthy, process, wait_until
from rollout_service.client import SyncRolloutClient

START_LIMIT_S = 600
_END_S = 60
_SERVE = "import sys, yaml; from rollout_service.cli.serve import run; run(yaml.safe_load(open(sys.argv[1])))"
"""What ``rollout-service serve`` does with its configuration."""


class ServedOptions(ModelOptions):
    """The model and its service."""

    tensor_parallel: int = 1
    """GPUs of a replica."""
    gpu_share: float | None = None
    """engine.gpu_memory_utilization; the shipped one if not given."""
    port: int = 8000


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
    command = [sys.executable, "-c", _SERVE, str(deployment)]
    log = served.folder / "serve.log"
    with process(command, log, folder=Path.cwd(), environment={}, grace_s=_END_S) as service:
        wait_until(lambda: is_healthy(url), service, START_LIMIT_S, log)
        yield url, {"start_s": round(time.monotonic() - started, 1)}


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
