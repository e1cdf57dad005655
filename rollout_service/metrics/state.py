"""The ingest's snapshot of the whole service for metrics."""

import asyncio
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from rollout_service.config import ScalingConfig
from rollout_service.protocol.fleet import Fleet, ReplicaState, ReplicaStatus
from rollout_service.protocol.weights import ServiceState, WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE

logger = logging.getLogger(__name__)
_MAX_COMMIT_TIMES = 1024
"""Number of commit times that are kept; those of older versions are dropped."""
_ENDED = ("draining", "failed")
"""States from which a replica may leave without a failure that is not counted yet."""


class FleetHistory:
    """History of the fleet and the log, which a snapshot does not contain."""

    def __init__(self, log: WeightLog, scaling: ScalingConfig) -> None:
        self._log, self._scaling = log, scaling
        self._committed_at: dict[int, float] = {}
        self._states: dict[str, ReplicaState] = {}
        self._starts = self._failures = 0
        self._free_bytes = 0
        self._has_warned = False

    def add_known(self, replicas: frozenset[str]) -> None:
        """Add replicas known before this process started; not counted as new."""
        self._states.update(dict.fromkeys(replicas, "ready"))

    def saw(self, live: tuple[ReplicaStatus, ...]) -> None:
        """Count replicas that started, failed or left. Call it with every report, once all possibly live replicas are
        known."""
        states = {status.replica_id: status.state for status in live}
        self._starts += len(states.keys() - self._states.keys())
        for replica_id, before in self._states.items():
            now = states.get(replica_id, "failed")
            self._failures += now == "failed" and before not in _ENDED
        self._states = states

    def note_left(self, replica_id: str) -> None:
        """Note that a replica ends regularly, which is not a failure."""
        if replica_id in self._states:
            self._states[replica_id] = "draining"

    async def state(self, fleet: Fleet, versions: tuple[WeightStatus, ...]) -> ServiceState:
        """Return the current state of the service."""
        committed = [status.version for status in versions if status.state != "staged"]
        committed_at, log_bytes = await asyncio.to_thread(self._measure_log, committed)
        self._committed_at |= committed_at
        for version in sorted(self._committed_at)[:-_MAX_COMMIT_TIMES]:
            del self._committed_at[version]
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
            log_free_bytes=self._free_bytes,
        )

    def _measure_log(self, versions: list[int]) -> tuple[dict[int, float], int]:
        """Return the commit times of those versions that have none yet, and the size of the log in bytes.

        What cannot be read is left out, and the first such error is logged.
        """
        # the manifest is the last file that a commit writes before the version exists
        manifests = {v: self._log.folder(v) / MANIFEST_FILE for v in versions if v not in self._committed_at}
        found = {v: _stat(path, self._note) for v, path in manifests.items()}
        try:
            self._free_bytes = shutil.disk_usage(self._log.root).free
        except OSError as error:  # the last known size stays
            self._note(error)
        log_bytes = folder_bytes(self._log.root, self._note)
        return {v: file.st_mtime for v, file in found.items() if file is not None}, log_bytes

    def _note(self, error: OSError) -> None:
        if not self._has_warned and not isinstance(error, FileNotFoundError):  # others are removed meanwhile
            self._has_warned = True
            logger.warning("metrics of the log leave out what cannot be read: %s; check the disk of the log", error)


def folder_bytes(folder: Path, note: Callable[[OSError], None]) -> int:
    """Return the size of all files, each counted once: a version and its rollback share files.

    ``note`` is called with the error of each path that cannot be read.
    """
    names = (Path(parent, name) for parent, _, files in os.walk(folder, onerror=note) for name in files)
    found = (file for path in names if (file := _stat(path, note)) is not None)
    return sum({(file.st_dev, file.st_ino): file.st_size for file in found}.values())


def _stat(path: Path, note: Callable[[OSError], None]) -> os.stat_result | None:
    """Return None if the path is no file, or cannot be read."""
    try:
        found = path.stat()
    except OSError as error:
        note(error)
        return None
    return found if stat.S_ISREG(found.st_mode) else None
