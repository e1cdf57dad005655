"""Where ``engine.staging: auto`` puts the next version on a GPU host: an area on the GPU is taken from the KV cache."""

from dataclasses import dataclass
from typing import Literal

MAX_CACHE_SHARE = 0.4
"""Share of the KV cache that an area on the GPU may take. An area in host memory closes the engine ten times as long at
each update, and a rollout's KV cache seldom fills the whole of a GPU."""
HOST_BYTES_PER_S = 50e9
"""At which versions are loaded from pinned memory: 9.4 GB in 0.19 s on an H200 with PCIe 5.0
(benchmarks/results/h200/update_engine.json)."""


@dataclass(frozen=True)
class StagingChoice:
    """A kind of staging area, and what was known."""

    kind: Literal["device", "host", "none"]
    area_bytes: int
    """Of each GPU's area: as large as its weights."""
    cache_bytes: int
    """What of a GPU's memory is left for the KV cache and scratch memory without an area."""
    host_bytes: int
    """What the machine has free."""

    @property
    def share(self) -> float:
        """Of the KV cache, that an area on the GPU takes."""
        return min(1.0, self.area_bytes / self.cache_bytes) if self.cache_bytes > 0 else 1.0

    @property
    def closed_s(self) -> float:
        """How long an update from host memory closes the engine for its copies."""
        return self.area_bytes / HOST_BYTES_PER_S

    def __str__(self) -> str:
        """Which it is, and what each would cost."""
        gb = f"{self.area_bytes / 1e9:.1f} GB"
        device = f"device: {gb}, {self.share:.0%} of the KV cache's {max(0, self.cache_bytes) / 1e9:.1f} GB"
        host = f"host: updates close the engine for {self.closed_s:.2f} s"
        if self.kind == "none":
            host = f"host: {gb} of memory for each GPU of an engine, and {self.host_bytes / 1e9:.1f} GB are free"
        return f"engine.staging auto is {self.kind} ({device}; {host})"


def choose(area_bytes: int, cache_bytes: int, host_bytes: int, ranks: int) -> StagingChoice:
    """Return ``device`` if it takes at most ``MAX_CACHE_SHARE`` of the KV cache, else ``host``, else ``none``.

    ``ranks``: GPUs of one engine, all on this machine. Its replicas share an area in host memory.
    """
    kind: Literal["device", "host", "none"]
    if 0 < area_bytes <= MAX_CACHE_SHARE * cache_bytes:
        kind = "device"
    elif area_bytes * ranks <= host_bytes:
        kind = "host"
    else:
        kind = "none"
    return StagingChoice(kind, area_bytes, cache_bytes, host_bytes)
