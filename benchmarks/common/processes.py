"""Processes of a benchmark: each in a group of its own, ended with all that it started."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.common.paths import PROJECT

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
"""vLLM and TRL look for this machine's address by a route to the internet, and find 0.0.0.0 without one."""

ROLLOUT_SERVICE = (sys.executable, "-c", "from rollout_service.cli.main import app; app()")
"""The command line, also where the package is only on the path."""


@contextmanager
def process(
    command: Sequence[str], log: Path, *, folder: Path, environment: Mapping[str, str], grace_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in ``folder`` until the block ends, then terminate it, and kill its group after ``grace_s``."""
    inherited = dict(os.environ)  # noqa: TID251 - a child's
    search = [PROJECT, *(Path(each).absolute() for each in inherited.get("PYTHONPATH", "").split(os.pathsep) if each)]
    path = {"PYTHONPATH": os.pathsep.join(map(str, search)), "PYTHONUNBUFFERED": "1"}
    everything = {**inherited, **path, **OFFLINE, **environment}
    with log.open("ab") as output:
        # a group of its own: Ctrl-C ends this process first, which then ends the command
        started = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env=everything, start_new_session=True
        )
    try:
        yield started
    finally:
        _end(started, grace_s)


def _end(started: subprocess.Popen[bytes], grace_s: float) -> None:
    if started.poll() is None:
        started.terminate()  # SIGINT may be ignored: a shell has its background commands do so
        try:
            started.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"process {started.pid} did not end in {grace_s:g} s: killed", flush=True)
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)  # what it left behind, too
    started.wait()


def wait_until(reached: Callable[[], object], running: subprocess.Popen[bytes], limit_s: float, log: Path) -> None:
    """Return once it is reached. Raises RuntimeError if the process ends before, or takes longer than ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not reached():
        if running.poll() is not None:
            raise RuntimeError(f"{running.args!r} ended with status {running.returncode}: its output is in {log}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{running.args!r} was not ready in {limit_s:.0f} s: its output is in {log}")
        time.sleep(0.2)


def is_healthy(url: str) -> bool:
    """Return True once the server answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def gpus() -> list[str]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, or 0 and 1; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - the user's, as of every program
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def raise_at_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that every block ends what it started."""

    def end(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would stop the ending
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
