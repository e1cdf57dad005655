"""What the machine did meanwhile: CPU cores of each kind of process, and the GPU's clock."""

import os
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread

import psutil

GPU_QUERY = (
    "nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=200",
)  # fmt: skip


def cpu_seconds() -> Counter[str]:
    """CPU seconds of this process (``caller``), of each kind of Ray's processes on this machine, and of vLLM's.

    Threads are included. Serve's replicas are named by their deployment, vLLM's processes ``VLLM::EngineCore``.
    """
    found = Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            name = "caller" if process.pid == os.getpid() else _kind(process.cmdline())
            if name is not None:
                times = process.cpu_times()
                found[name] += times.user + times.system
    return found


def _kind(command: list[str]) -> str | None:
    title = command[0].strip() if command else ""
    if title.startswith("VLLM::"):
        return title
    if title.startswith("ray::"):
        return title.removeprefix("ray::").partition(".")[0].rpartition(":")[2]
    return None


@dataclass
class GpuWatch:
    """Samples of GPU 0, five a second; both stay empty without ``nvidia-smi``."""

    sm_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    def take(self) -> dict[str, float]:
        """Medians of the samples since the last call; nothing if there are none."""
        found = {"sm_mhz": self.sm_mhz, "power_w": self.power_w}
        medians = {name: statistics.median(samples) for name, samples in found.items() if samples}
        self.sm_mhz, self.power_w = [], []
        return medians

    def read(self, lines: Iterator[str]) -> None:
        """Take in what ``GPU_QUERY`` prints."""
        for line in lines:
            with suppress(ValueError):  # "[N/A]" where a GPU does not tell
                clock, power = map(float, line.split(","))
                self.sm_mhz.append(clock)
                self.power_w.append(power)


@contextmanager
def gpu_watch() -> Iterator[GpuWatch]:
    """Watch until the block ends."""
    watch = GpuWatch()
    if shutil.which(GPU_QUERY[0]) is None:
        yield watch
        return
    with subprocess.Popen(GPU_QUERY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        Thread(target=watch.read, args=(process.stdout,), daemon=True).start()
        try:
            yield watch
        finally:
            process.terminate()
