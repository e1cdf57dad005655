"""The GPUs of this machine and their free memory, from nvidia-smi. Imports neither torch nor an engine."""

import os
import subprocess
from collections.abc import Sequence

from rollout_service.protocol.base import Frozen

COMMAND_LIMIT_S = 10.0
"""Timeout in seconds of a command; nvidia-smi hangs if a GPU does."""
_GPU_FIELDS = ("index", "name", "memory.total", "memory.free", "compute_cap", "driver_version", "uuid")
_HOLDER_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


class Gpu(Frozen):
    """A GPU that the driver lists."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    driver: str
    """Version of the driver."""
    uuid: str = ""
    """NVIDIA's id of this GPU, which ``CUDA_VISIBLE_DEVICES`` also accepts."""

    def why_taken(self, share: float) -> str | None:
        """Return why an engine with that ``gpu_memory_utilization`` finds too little free memory; None: it fits."""
        asked = int(share * self.memory_bytes)
        if self.free_bytes >= asked:
            return None
        return (
            f"{_gb(self.free_bytes)} of {_gb(self.memory_bytes)} are free, and engine.gpu_memory_utilization: "
            f"{share:g} asks for {_gb(asked)}"
        )


class Holder(Frozen):
    """A process that holds memory of a GPU."""

    gpu_uuid: str
    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists; empty without it. Raises OSError, ValueError, TimeoutExpired."""
    return gpus_from(_queried("gpu", _GPU_FIELDS))


def _queried(what: str, fields: Sequence[str]) -> str:
    try:
        return output_of("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return ""


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process. Raises the errors of ``gpus``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - the user's, as of every program
    listed = gpus()
    return listed if visible is None else select_gpus(listed, visible)


def select_gpus(listed: Sequence[Gpu], devices: str) -> tuple[Gpu, ...]:
    """Return the GPUs in ``devices``, comma-separated indices and UUIDs, as in ``CUDA_VISIBLE_DEVICES``.

    A part of a GPU (MIG) has no free memory of its own here, and is left out.
    """
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return tuple(
        gpu
        for gpu in listed
        if any(name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)) for name in names)
    )


def holders() -> tuple[Holder, ...]:
    """Return the processes on the GPUs. In a container, nvidia-smi may list none of those outside.

    Raises OSError if nvidia-smi fails, subprocess.TimeoutExpired.
    """
    return holders_from(_queried("compute-apps", _HOLDER_FIELDS))


def holders_from(csv: str) -> tuple[Holder, ...]:
    """Parse nvidia-smi's output, a line for each process. Names, which may contain commas, are cut to 60 characters."""
    found = []
    for line in csv.strip().splitlines():
        uuid, _, rest = line.partition(",")
        pid, _, rest = rest.partition(",")
        if uuid.startswith("GPU-") and pid.strip().isdecimal():
            found.append(Holder(gpu_uuid=uuid, pid=int(pid), name=rest.rpartition(",")[0].strip()[-60:]))
    return tuple(found)


def find_taken(gpus: Sequence[Gpu], holders: Sequence[Holder], share: float) -> dict[int, str]:
    """Return index → why an engine finds too little free memory on that GPU, and the known processes that hold it."""
    found = {}
    for gpu in gpus:
        if (why := gpu.why_taken(share)) is not None:
            here = ", ".join(str(holder) for holder in holders if holder.gpu_uuid == gpu.uuid)
            found[gpu.index] = f"{why}; in use by {here or 'a process that is not seen from here'}"
    return found


def gpus_from(csv: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's output, a line for each GPU, memory in MiB. Raises ValueError for other output."""
    return tuple(map(_gpu, csv.strip().splitlines()))


def _gpu(line: str) -> Gpu:
    try:
        index, name, total, free, capability, driver, uuid = (field.strip() for field in line.split(","))
        major, minor = map(int, capability.split("."))
        memory_bytes, free_bytes = int(total) << 20, int(free) << 20
    except ValueError as error:
        raise ValueError(f"nvidia-smi printed {line!r} instead of {', '.join(_GPU_FIELDS)}") from error
    return Gpu(
        index=int(index),
        name=name,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        compute_capability=(major, minor),
        driver=driver,
        uuid=uuid,
    )


def output_of(*command: str) -> str:
    """Run a program, and return its output. Raises OSError if it fails, subprocess.TimeoutExpired."""
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # a process may have any bytes as its name
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise OSError(f"{command[0]} failed with exit status {done.returncode}: {said[:300]}")
    return done.stdout


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
