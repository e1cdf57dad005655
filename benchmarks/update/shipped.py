"""What a user gets: `rollout-service serve FOLDER` and `push_weights("next", model.state_dict())`, with no options.

    python -m benchmarks.update.shipped [--replicas 1] [--transport auto --transport http --transport http:trainer]

Writes random weights of a published shape, starts the service as it comes, and pushes a transformers model from the
last GPU while rollouts run. A transport is one of ``push_weights``; ``:trainer`` has the trainer quantize. With two or
more replicas, one is killed at the end, to time the start of another beside those that serve. Each start and each
transport is a case of benchmarks/results/<machine>/update_shipped.json. With `--model tiny` it runs on a CPU.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.gpu_service import write_weights
from benchmarks.common.processes import ROLLOUT_SERVICE, is_healthy
from benchmarks.common.shapes import Shape, write_config
from benchmarks.soak.strike import victims
from benchmarks.update.busy import rollouts
from rollout_service.client import SyncRolloutClient
from rollout_service.model.tiny import make_tiny_qwen3

FIRST_PUSHES = 3
"""Told apart from later ones, whose median is the headline."""
_START_LIMIT_S = 600
_END_S = 60
MILESTONES = {
    "Ray runs": "Started a local Ray instance",
    "Serve runs": "Started Serve in namespace",
    "the application is built": "Deploying new version of Deployment(name='engine'",
    "the replica's process has its imports": "rollout_engine",
    "vLLM's process has its imports": "Initializing a V1 LLM engine",
    "the model is made": "Model loading took",
    "torch.compile is done": "torch.compile took",
    "memory is measured": "Available KV cache memory",
    "CUDA graphs are captured": "Graph capturing finished",
    "vLLM is ready": "init engine (profile",
    "version 0 is loaded": "version 0: staged",
}
"""What a start does → the text of the log that says so."""
_SERVE_RUN = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run"]


class ShippedOptions(Options):
    """What is measured."""

    model: str = Shape.QWEN3_8B.value
    """A published shape, or tiny."""
    folder: Path = Path(tempfile.gettempdir()) / "shipped-models"
    """Where weights are put; those of an earlier run are used again."""
    replicas: int = 1
    starts: int = 1
    """Starts of the service one after the other; pushes go to the last. On a fresh host the first compiles."""
    transport: tuple[str, ...] = ("auto", "http", "http:trainer", "delta")
    pushes: int = 7
    """By each transport."""
    concurrent: int = 64
    """Rollouts under way."""
    gpu_share: float | None = None
    """engine.gpu_memory_utilization; the shipped one if not given."""
    port: int = 8000


def main(asked: ShippedOptions) -> None:
    """Start the shipped service, push, and write the result."""
    model = _model(asked)
    common = {"model": asked.model, "replicas": asked.replicas, "gpu_share": asked.gpu_share}
    found: list[dict[str, Any]] = []
    for again in range(asked.starts):
        with _served(model, asked) as (url, start), SyncRolloutClient(url) as client:
            fleet = client.fleet()
            where = None if fleet.log is None else fleet.log.model_dump(mode="json")
            common |= {"staging": fleet.replicas[0].staging}
            _keep(found, common | {"transport": f"start {again + 1}", **start, "log": where})
            if again + 1 < asked.starts:
                continue
            with rollouts(url, asked.concurrent):
                trainer = _trainer(model)
                for transport in asked.transport:
                    _keep(found, common | {"transport": transport, **_pushed(client, trainer, transport, asked.pushes)})
            if asked.replicas > 1:
                _keep(found, common | {"transport": "another replica", "start_s": _replaced(client, asked.replicas)})


def _model(asked: ShippedOptions) -> Path:
    folder = asked.folder / asked.model
    if not any(folder.glob("*.safetensors")):
        if asked.model == "tiny":
            make_tiny_qwen3(folder)
        else:
            write_weights(write_config(Shape(asked.model), folder))
            torch.cuda.empty_cache()
    return folder


@contextmanager
def _served(model: Path, asked: ShippedOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the shipped deployment until the block ends; yield its URL, and how long its start took."""
    command = [*ROLLOUT_SERVICE, "serve", str(model), "--replicas", str(asked.replicas), "--port", str(asked.port)]
    printed = subprocess.run([*command, "--print-config"], check=True, capture_output=True, text=True).stdout
    document = yaml.safe_load(printed)
    if asked.gpu_share is not None:
        document["applications"][0]["args"]["engine"]["gpu_memory_utilization"] = asked.gpu_share
    deployment = asked.folder / "deployment.yaml"
    deployment.write_text(yaml.safe_dump(document))
    url, started = f"http://127.0.0.1:{asked.port}", time.monotonic()
    # a session of its own: Ctrl-C ends this process first, which then ends the service
    service = subprocess.Popen(
        [*_SERVE_RUN, str(deployment)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    reached: dict[str, float] = {}
    reading = threading.Thread(target=_read_log, args=(service, asked.folder / "serve.log", started, reached))
    reading.start()
    try:
        _wait(url, service, started)
        yield url, {"start_s": round(time.monotonic() - started, 1), "reached_s": dict(reached)}
    finally:
        service.send_signal(signal.SIGINT)
        try:
            service.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(service.pid, signal.SIGKILL)
        reading.join()


def _read_log(service: subprocess.Popen[str], file: Path, started: float, reached: dict[str, float]) -> None:
    """Write the service's output to ``file``, each line with its time, and note when each milestone came first."""
    assert service.stdout is not None
    with file.open("w", buffering=1) as log:
        for line in service.stdout:
            now = time.monotonic() - started
            log.write(f"{now:7.1f} {line}")
            for name, text in MILESTONES.items():
                if text in line:
                    reached.setdefault(name, round(now, 1))


def _wait(url: str, service: subprocess.Popen[str], started: float) -> None:
    """Return once the service answers. Raises RuntimeError if it ends, or takes longer than ten minutes."""
    while not is_healthy(url):
        if service.poll() is not None or time.monotonic() - started > _START_LIMIT_S:
            raise RuntimeError("the service did not start: its output is in serve.log")
        time.sleep(0.5)


def _trainer(model: Path) -> torch.nn.Module:
    """Return a BF16 model with random weights on the last GPU, or on the CPU."""
    device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    with torch.device(device):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        )
    return made


def _pushed(client: SyncRolloutClient, trainer: torch.nn.Module, transport: str, pushes: int) -> dict[str, Any]:
    """Push versions whose weights all differ a little; return the seconds of each, and how long engines closed."""
    name, _, quantizer = transport.partition(":")
    options: dict[str, Any] = {"transport": name} | ({"quantize": quantizer} if quantizer else {})
    push_s, closed_s, sent = list[float](), list[float](), list[int]()
    for _ in range(pushes):
        with torch.no_grad():
            for weights in trainer.parameters():
                weights.add_(torch.randn_like(weights) * 1e-5 * weights.abs().mean())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        status = client.push_weights("next", trainer.state_dict(), **options)
        push_s.append(time.perf_counter() - started)
        closed_s.append(max(replica.update.closed_s for replica in client.fleet().replicas if replica.update))
        sent.append(status.uploaded_bytes or 0)
        time.sleep(1.0)  # a trainer's step lasts longer
    return {
        "first_push_s": push_s[:FIRST_PUSHES],
        "push_s": push_s[FIRST_PUSHES:],
        "median_push_s": statistics.median(push_s[FIRST_PUSHES:] or push_s),
        "closed_s": closed_s,
        "uploaded_bytes": sent[-1],
    }


def _replaced(client: SyncRolloutClient, replicas: int) -> float:
    """Kill one replica; return the seconds until as many as before are ready, among them a new one."""
    before = {replica.replica_id for replica in client.fleet().replicas}
    started = time.monotonic()
    victims()["replica"][0].kill()
    while True:
        ready = {replica.replica_id for replica in client.fleet().replicas if replica.state == "ready"}
        if len(ready) == replicas and ready - before:
            return round(time.monotonic() - started, 1)
        if time.monotonic() - started > _START_LIMIT_S:
            raise RuntimeError("the killed replica was not replaced: the service's output is in serve.log")
        time.sleep(0.25)


def _keep(found: list[dict[str, Any]], case: dict[str, Any]) -> None:
    """Print a case, and write all that were found so far."""
    print(json.dumps(case), flush=True)
    found.append(case)
    same = ("model", "replicas", "gpu_share", "transport")
    results.write("update_shipped", {"cases": results.joined(results.cases("update_shipped"), found, same)})


if __name__ == "__main__":
    run(main)
