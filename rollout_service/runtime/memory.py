"""Memory of the machine, or of the container that this process is in."""

import os
from pathlib import Path

from rollout_service.protocol.base import Frozen

_HOST = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_ABOUT_UNLIMITED = 1 << 60


class Memory(Frozen):
    """Of the machine, or of the container that this process is in."""

    total_bytes: int
    used_bytes: int
    """Without what the kernel gives back when it is asked for."""
    kill_at: float
    """Share of it in use from which on Ray kills workers."""

    @property
    def free_bytes(self) -> int:
        """What can be taken before Ray kills workers."""
        return max(0, int(self.kill_at * self.total_bytes) - self.used_bytes)


def memory() -> Memory:
    """In use is what Ray counts, too."""
    host = dict(line.split()[:2] for line in _HOST.read_text().splitlines())  # in KiB
    total = int(host["MemTotal:"]) << 10
    used = total - (int(host["MemAvailable:"]) << 10)
    limit, of_cgroup = _cgroup_memory()
    if limit < total:
        total, used = limit, of_cgroup
    kill_at = float(os.environ.get("RAY_memory_usage_threshold", "0.95"))  # noqa: SIM112, TID251 - Ray's own
    return Memory(total_bytes=total, used_bytes=used, kill_at=kill_at)


def _cgroup_memory() -> tuple[int, int]:
    """Limit and use of the container's memory, in bytes, as cgroups of either version tell it."""
    for folder, limit, usage, reclaimable in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        return (_ABOUT_UNLIMITED if most == "max" else int(most)), used - int(stat.get(reclaimable, 0))
    return _ABOUT_UNLIMITED, 0
