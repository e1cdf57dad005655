"""Where benchmark results go, and what every one of them says about how it came to be."""

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rollout-service", "torch", "ray", "transformers")


def machine() -> str:
    """A short name of this machine: its GPUs, or its number of cores."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace(" ", "-")
        return f"{torch.cuda.device_count()}x-{name}"
    return f"cpu-{psutil.cpu_count()}-cores"


def write(name: str, content: dict[str, Any]) -> Path:
    """Write ``benchmarks/results/<machine>/<name>.json`` with versions, command and processor."""
    path = RESULTS / machine() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES} | {"vllm": _vllm()},
    }
    path.write_text(json.dumps(origin | content, indent=1) + "\n")
    return path


def _vllm() -> str:
    from rollout_service.engine.vllm_compat import installed_vllm

    return str(installed_vllm())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
