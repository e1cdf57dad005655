"""Files of dropped versions, kept to be written again by the next version of the same layout.

Only where the log is in memory: new pages of a tmpfs cost more than all the rest of a version, and a process that has a
file mapped and registered with CUDA has it still under its next name (``mapped_files.py``). At most one version's files
are kept, in ``<root>/spare``; without them the next version would take as much memory while it is written.
"""

import fcntl
import logging
import os
import threading
import uuid
from pathlib import Path

from rollout_service.store.durable_io import remove_tree

logger = logging.getLogger(__name__)


class SpareFiles:
    """Those of one log. Used by its only writer; threads may share it."""

    def __init__(self, root: Path) -> None:
        """``root``: of the log."""
        self._folder = root / "spare"
        self._lock = threading.Lock()

    @staticmethod
    def are_kept_in(root: Path) -> bool:
        """Whether the log's writer uses files again: readers then may map them."""
        return (root / "spare").is_dir()

    def begin(self) -> None:
        """Have readers know that files are used again. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def keep(self, dropped: Path) -> None:
        """Take the weights out of the folder of a dropped version, in place of all that is kept. Raises OSError.

        A file that somebody reads still, or that a rolled back version has, too, stays where it is.
        """
        with self._lock:
            for path in self._folder.iterdir():
                path.unlink()
            for path in sorted(dropped.glob("*.safetensors")):
                if path.stat().st_nlink == 1 and _nobody_reads(path):
                    path.rename(self._folder / uuid.uuid4().hex)

    def take(self, nbytes: int, path: Path) -> bool:
        """Make a kept file of that size ``path``, with whatever is in it; False if there is none. Raises OSError."""
        with self._lock:
            for kept in self._folder.iterdir():
                if kept.stat().st_size == nbytes:
                    kept.rename(path)
                    return True
        return False

    def clear(self) -> None:
        """Give the memory back. Raises OSError."""
        with self._lock:
            remove_tree(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)


def _nobody_reads(path: Path) -> bool:
    """Who opens the file after this finds that it has another name: see ``open_version_file``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        logger.info("%s is being read still, and is not used again", path)
        return False
    finally:
        os.close(fd)
