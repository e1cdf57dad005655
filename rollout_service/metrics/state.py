"""What the ingest tells of the whole when it is asked for metrics."""

import asyncio
import os
import shutil
import stat
import time
from pathlib import Path

from rollout_service.config import ScalingConfig
from rollout_service.protocol.fleet import Fleet, ReplicaState, ReplicaStatus
from rollout_service.protocol.state import DurableState, KVScalesState, ServiceState
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE

_REMEMBERED = 1024
"""Times of commits that are kept; those of older versions are forgotten."""
_OVER = ("draining", "failed")


class FleetHistory:
    """History of the fleet and the log that a snapshot of them lacks."""

    def __init__(self, log: WeightLog, scaling: ScalingConfig) -> None:
        self._log, self._scaling = log, scaling
        self._committed_at: dict[int, float] = {}
        self._states: dict[str, ReplicaState] = {}
        self._starts = self._failures = 0

    def known(self, replicas: frozenset[str]) -> None:
        """These were there before: they do not count as started."""
        self._states.update(dict.fromkeys(replicas, "ready"))

    def saw(self, live: tuple[ReplicaStatus, ...]) -> None:
        """Count who came, failed or went; to be called with every report, once all are known that may be live."""
        states = {status.replica_id: status.state for status in live}
        self._starts += len(states.keys() - self._states.keys())
        for replica_id, before in self._states.items():
            now = states.get(replica_id, "failed")
            self._failures += now == "failed" and before not in _OVER
        self._states = states

    def left(self, replica_id: str) -> None:
        """It said that it ends: that is no failure."""
        if replica_id in self._states:
            self._states[replica_id] = "draining"

    async def state(
        self,
        fleet: Fleet,
        versions: tuple[WeightStatus, ...],
        kv_scales: KVScalesState | None = None,
        durable: DurableState | None = None,
    ) -> ServiceState:
        """The service now."""
        committed = [status.version for status in versions if status.state != "staged"]
        for version, at in (await asyncio.to_thread(self._commit_times, committed)).items():
            self._committed_at[version] = at
        for version in sorted(self._committed_at)[:-_REMEMBERED]:
            del self._committed_at[version]
        log_bytes = await asyncio.to_thread(folder_bytes, self._log.root)
        return ServiceState(
            at=time.time(),
            fleet=fleet,
            versions=versions,
            committed_at=dict(self._committed_at),
            replicas_min=self._scaling.min_replicas,
            replicas_max=self._scaling.max_replicas,
            replica_starts=self._starts,
            replica_failures=self._failures,
            log_bytes=log_bytes,
            log_free_bytes=free_bytes(self._log.root),
            kv_scales=kv_scales or KVScalesState(),
            durable=durable,
        )

    def _commit_times(self, versions: list[int]) -> dict[int, float]:
        """The manifest is the last file that a commit writes before the version exists."""
        found = {}
        for version in versions:
            if version not in self._committed_at:
                written = _stat(self._log.folder(version) / MANIFEST_FILE)
                found.update({} if written is None else {version: written.st_mtime})
        return found


def free_bytes(folder: Path) -> int:
    """Of the file system that it is on."""
    return shutil.disk_usage(folder).free


def folder_bytes(folder: Path) -> int:
    """Of all files, each once: a version that was rolled back to shares its files with its successor."""
    found = (file for path in folder.rglob("*") if (file := _stat(path)) is not None)
    return sum({(file.st_dev, file.st_ino): file.st_size for file in found}.values())


def _stat(path: Path) -> os.stat_result | None:
    """None if it is gone, or no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None
