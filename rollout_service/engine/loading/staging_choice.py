"""The choice of ``engine.staging: auto`` between GPU and host memory. A staging buffer on the GPU reduces the KV
cache."""

from dataclasses import dataclass
from typing import Literal

MAX_CACHE_SHARE = 0.4
"""Maximum share of the KV cache that a buffer on the GPU may take. A buffer in host memory makes each update's pause
ten times as long, and rollouts seldom fill a GPU's whole KV cache."""
HOST_BYTES_PER_S = 50e9
"""Rate of loading from pinned memory: 9.4 GB in 0.19 s on an H200 with PCIe 5.0
(benchmarks/results/h200/update_engine.json)."""


@dataclass(frozen=True)
class StagingChoice:
    """The kind of staging buffer, and the sizes that led to it."""

    kind: Literal["device", "host", "none"]
    area_bytes: int
    """Size of the buffer per GPU, equal to its weights."""
    cache_bytes: int
    """GPU memory for the KV cache and scratch memory without a staging buffer."""
    host_bytes: int
    """Free memory of the machine."""

    @property
    def share(self) -> float:
        """Share of the KV cache that a buffer on the GPU takes."""
        return min(1.0, self.area_bytes / self.cache_bytes) if self.cache_bytes > 0 else 1.0

    @property
    def closed_s(self) -> float:
        """Seconds that the copies of an update from host memory pause the engine."""
        return self.area_bytes / HOST_BYTES_PER_S

    def __str__(self) -> str:
        """Return the choice and the cost of each kind."""
        gb = f"{self.area_bytes / 1e9:.1f} GB"
        device = f"device: {gb}, {self.share:.0%} of the KV cache's {max(0, self.cache_bytes) / 1e9:.1f} GB"
        host = f"host: updates close the engine for {self.closed_s:.2f} s"
        if self.kind == "none":
            host = f"host: {gb} of memory for each GPU of an engine, and {self.host_bytes / 1e9:.1f} GB are free"
        return f"engine.staging auto is {self.kind} ({device}; {host})"


def choose(area_bytes: int, cache_bytes: int, host_bytes: int, ranks: int) -> StagingChoice:
    """Return ``device`` if it takes at most ``MAX_CACHE_SHARE`` of the KV cache, else ``host``, else ``none``.

    ``ranks``: GPUs of one engine, all on this machine. Each has a buffer of its own.
    """
    kind: Literal["device", "host", "none"]
    if 0 < area_bytes <= MAX_CACHE_SHARE * cache_bytes:
        kind = "device"
    elif area_bytes * ranks <= host_bytes:
        kind = "host"
    else:
        kind = "none"
    return StagingChoice(kind, area_bytes, cache_bytes, host_bytes)
