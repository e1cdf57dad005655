"""Stage a kept version's files again under a new number. A rollback copies no bytes if the file system supports links.

The files are hard links: each version's folder is complete, and dropping one version does not affect the other.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollout_service.errors import NotFound
from rollout_service.store.durable_io import DISK_FULL, no_room, remove_tree
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest

_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES})
"""Error numbers of file systems that do not support hard links, or allow no more of them."""


def require_kept(kept: Sequence[int], version: int, labels: VersionLabels) -> None:
    """Raise NotFound, with the kept versions, if ``version`` is not in ``kept``, which is in order."""
    if version not in kept:
        raise NotFound(
            f"version {labels.spelled([version])} cannot be made the newest again, because it is not in the log "
            f"{'any more' if kept and version < kept[-1] else 'yet'}: kept are {labels.spelled(kept)}. "
            "weights.keep_versions says how many stay; push older weights as a new version",
            {"version": version, "versions": kept},
        )


def stage_again(log: WeightLog, source: Manifest, version: int) -> Manifest:
    """Lay out the files of a kept version as ``version``, and return its manifest, ready for ``WeightLog.commit``.

    Every byte is first read and compared with its digest. Raises LogCorrupt, InsufficientStorage or OSError, and then
    leaves no files behind. ``source``: the kept version's manifest.
    """
    folder, staged = log.folder(source.version), log.staging(version)
    log.verify(source)
    remove_tree(staged)
    try:
        staged.mkdir(parents=True)
        for file in source.places.files:
            _link(folder / file, staged / file)
    except OSError as error:
        remove_tree(staged)
        if error.errno in DISK_FULL:
            raise no_room(f"version {version}, a copy of {source.version},", log.root, source.total_bytes) from error
        raise
    return source.replace(version=version, rollback_of=source.version)


def _link(file: Path, path: Path) -> None:
    try:
        os.link(file, path)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(file, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
