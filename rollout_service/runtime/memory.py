"""Memory of the machine, or of the container that this process is in."""

import os
from pathlib import Path

from rollout_service.protocol.base import Frozen

_HOST = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class Memory(Frozen):
    """Size and use of the memory of the machine, or of this process's container."""

    total_bytes: int
    used_bytes: int
    """Used bytes, without memory that the kernel can reclaim."""
    kill_at: float
    """Share of used memory above which Ray kills workers."""

    @property
    def free_bytes(self) -> int:
        """Return the bytes that can be allocated before Ray kills workers."""
        return max(0, int(self.kill_at * self.total_bytes) - self.used_bytes)


def memory() -> Memory:
    """Return the memory; used bytes are counted like Ray does. Raises ValueError if Ray's threshold is no number."""
    host = dict(line.split()[:2] for line in _HOST.read_text().splitlines())  # in KiB
    total = int(host["MemTotal:"]) << 10
    used = total - (int(host["MemAvailable:"]) << 10)
    limit, of_cgroup = _cgroup_memory()
    if limit < total:
        total, used = limit, of_cgroup
    threshold = os.environ.get("RAY_memory_usage_threshold", "0.95")  # noqa: SIM112, TID251 - Ray's own
    try:
        return Memory(total_bytes=total, used_bytes=used, kill_at=float(threshold))
    except ValueError as error:
        raise ValueError(
            f"RAY_memory_usage_threshold={threshold} is not a number: set it to a share such as 0.95"
        ) from error


def _cgroup_memory() -> tuple[int, int]:
    """Return limit and use of the container's memory in bytes, for cgroups of either version."""
    for folder, limit, usage, reclaimable in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        return (_UNLIMITED if limit_text == "max" else int(limit_text)), used - int(stat.get(reclaimable, 0))
    return _UNLIMITED, 0
