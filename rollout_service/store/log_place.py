"""Choose the log's folder for ``weights.root: auto``: in memory if the host has room, else ``disk_root``.

The ingest chooses, since the log lies on its node. An existing log is continued wherever it lies. A file in
``disk_root`` names the folder in memory; if ``disk_root`` was removed, the log in memory is removed, too.
"""

import logging
import os
import pwd
import shutil
from pathlib import Path

import xxhash

from rollout_service.config import ServiceConfig
from rollout_service.config.service import AUTO
from rollout_service.errors import LogLocked
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import LogPlace
from rollout_service.runtime.memory import memory
from rollout_service.store.durable_io import WriterLock, make_private, remove_tree, replace_synced, require_own
from rollout_service.store.log import IN_MEMORY, log_at

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
_FIRST_USER = 1000
"""User ids from here on are people's; RemoveIPC spares those of the system."""
_FREE_SHARE = 0.15
"""Share of the host's memory that stays free for engines, trainers and Ray."""


def log_place(config: ServiceConfig, shared_memory: Path = SHARED_MEMORY) -> LogPlace:
    """Return the folder that the log has, or would get, on this node, and why. Changes nothing.

    ``config.model.path`` must be a folder of this node. Raises ValueError for an unset variable in a path.
    """
    weights = config.weights
    if weights.root != AUTO:
        return LogPlace(root=weights.root_here(), why="weights.root names it")
    disk = weights.disk_root_here()
    user = shared_memory / f"rollout-service-{os.geteuid()}"
    in_memory = user / name_with_hash(disk)
    if (in_memory / "LATEST").exists() and (disk / IN_MEMORY).exists():
        return LogPlace(root=in_memory, why="the log in memory is continued")
    if (disk / "LATEST").exists():
        why = "the log on the disk is continued: remove it, or set weights.root, to have updates in memory"
        return LogPlace(root=disk, why=why)
    needed, free = bytes_in_memory(config), _free_bytes(shared_memory)
    room = f"the log needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB can be taken"
    if needed > free:
        return LogPlace(root=disk, why=f"{room}: on a disk updates take seconds longer")
    if _is_removed_at_logout():
        why = (
            "systemd removes what a user has in memory when the user's last session ends: run `loginctl "
            "enable-linger`, or set weights.root, to have updates in memory"
        )
        return LogPlace(root=disk, why=why)
    if os.path.lexists(user):
        try:
            require_own(user)
        except LogLocked as error:
            return LogPlace(root=disk, why=error.message)
    return LogPlace(root=in_memory, why=room)


def name_with_hash(folder: Path) -> str:
    """Return a folder's name with a hash of its path, since folders elsewhere may have the same name."""
    return f"{folder.name}-{xxhash.xxh3_64_hexdigest(str(folder).encode())[:8]}"


def claim_log_place(config: ServiceConfig, shared_memory: Path = SHARED_MEMORY) -> LogPlace:
    """Return ``log_place`` after creating its folder; a folder in memory is private to the user.

    Raises the errors of ``log_place``; OSError, or LogLocked if the log's ``disk_root`` was removed under a running
    service.
    """
    place = log_place(config, shared_memory)
    if config.weights.root != AUTO:
        return place
    marker = config.weights.disk_root_here() / IN_MEMORY
    before = log_at(marker.parent)
    if before not in (place.root, marker.parent) and (before / "LATEST").exists():
        logger.warning(
            "%s was renamed or copied, and its log in memory stays at %s, unused, while another begins at %s: rename "
            "the folder back to continue that log, or remove %s if no other service has it", marker.parent, before,
            place.root, before,
        )  # fmt: skip
    if not place.root.is_relative_to(shared_memory):
        return place
    make_private(place.root.parent)
    if not marker.exists():
        if place.root.exists():
            with WriterLock(place.root).acquire(0):
                remove_tree(place.root)
        marker.parent.mkdir(parents=True, exist_ok=True)
    if before != place.root:  # ``disk_root`` is new, or was moved or copied
        replace_synced(marker, f"{place.root}\n")  # a full disk must not leave an empty one
    make_private(place.root)
    return place


def bytes_in_memory(config: ServiceConfig) -> int:
    """Return the log's maximum size in bytes: the kept and the pinned versions, one being written, and one upload."""
    model = ServedModel.of(config.model)
    plan = model.plan(config.quant, config.engine.tensor_parallel_size, config.engine.expert_parallel)
    version = sum(model.stored_bytes(name, plan) for name in model.stored)
    upload = 2 * model.elements  # BF16
    return (max(2, config.weights.keep_versions) + len(config.scaling.groups) + 1) * version + upload


def _free_bytes(shared_memory: Path) -> int:
    """Return the bytes that a log may take: limited by /dev/shm, and by the memory beyond ``_FREE_SHARE``."""
    has = memory()
    try:
        of_folder = shutil.disk_usage(shared_memory).free
    except OSError:
        return 0
    return max(0, min(of_folder, has.free_bytes - int(_FREE_SHARE * has.total_bytes)))


def _is_removed_at_logout() -> bool:
    """Return True if logind's RemoveIPC, which is on by default, empties this user's /dev/shm at the last logout."""
    user = os.geteuid()
    if user < _FIRST_USER or not Path("/run/systemd/system").is_dir():
        return False
    return not Path("/var/lib/systemd/linger", pwd.getpwuid(user).pw_name).exists()
