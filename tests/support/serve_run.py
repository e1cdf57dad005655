"""``serve run`` of a deployment, as users type it."""

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from rollout_service.config.deployment_file import Document
from rollout_service.local import free_port
from tests.support.processes import MARK

_SERVE = str(Path(sys.executable).with_name("serve"))


@dataclass(frozen=True)
class ServeRun:
    """A running command."""

    process: subprocess.Popen[bytes]
    url: str
    output: Path
    mark: str
    """The value of ``tests.support.processes.MARK`` in the environment of the command and of all its processes."""

    @property
    def said(self) -> str:
        """All that it and its processes have written."""
        return self.output.read_text()

    def interrupt(self) -> int:
        """As Ctrl-C does; its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait()


@contextmanager
def serve_run(document: Document, folder: Path, *, address: str | None = None) -> Iterator[ServeRun]:
    """The command, started in ``folder`` with a free port, once what it runs is healthy; interrupted at the end.

    ``address``: of the Ray cluster; None starts one, as the command does by itself.
    """
    port, mark = free_port(), uuid.uuid4().hex
    document = {**document, "http_options": {**document["http_options"], "port": port}}
    (folder / "deployment.yaml").write_text(yaml.safe_dump(document))
    command = ["env", f"{MARK}={mark}", _SERVE, "run", "deployment.yaml", *(["--address", address] if address else [])]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    run = ServeRun(process, f"http://127.0.0.1:{port}", folder / "output", mark)
    try:
        while not _healthy(f"{run.url}/health"):
            assert process.poll() is None, f"serve run ended before it was healthy:\n{run.said}"
            time.sleep(0.5)
        yield run
    finally:
        run.interrupt()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
