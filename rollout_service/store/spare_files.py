"""Files in memory for reuse by the next versions: created at the start, later taken from dropped versions.

Used only if the log is in memory. Allocating new pages of a tmpfs takes longer than all other work for a version. A
process that has mapped a file and registered it with CUDA keeps both when the file is renamed (``mapped_files.py``).
The files are in ``<root>/spare``. Those of a dropped version replace all others there.
"""

import fcntl
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from rollout_service.store.durable_io import DISK_FULL, remove_tree
from rollout_service.store.mapped_files import is_in_memory

logger = logging.getLogger(__name__)
_MAKING = ".spare-"


class SpareFiles:
    """The spare files of one log. Used by its only writer. Thread-safe."""

    def __init__(self, root: Path) -> None:
        """``root``: folder of the log."""
        self._folder = root / "spare"
        self._lock = threading.Lock()

    @staticmethod
    def are_kept_in(root: Path) -> bool:
        """Return True if the log's writer reuses files: readers then may map them."""
        return (root / "spare").is_dir() and is_in_memory(root)  # the folder may have been copied from another machine

    def begin(self) -> None:
        """Show readers that files are reused. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.parent.glob(f"{_MAKING}*"):  # left over from a process that was killed
            unfinished.unlink()

    def keep(self, dropped: Path) -> None:
        """Move the weights out of a dropped version's folder, and replace all spare files by them. Raises OSError.

        A file that is still read, or that a rolled back version shares, is left in place.
        """
        with self._lock:
            for path in self._folder.iterdir():
                path.unlink()
            for path in sorted(dropped.glob("*.safetensors")):
                if path.stat().st_nlink == 1 and _nobody_reads(path):
                    path.rename(self._folder / uuid.uuid4().hex)

    def take(self, nbytes: int, path: Path) -> bool:
        """Rename a spare file of that size to ``path``, with its old content. Return False if there is none. Raises
        OSError."""
        with self._lock:
            for kept in self._folder.iterdir():
                if kept.stat().st_size == nbytes:
                    kept.rename(path)
                    return True
        return False

    def make(self, sizes: Iterable[int], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Create a file of each size in bytes that is missing, until memory is full. Raises OSError."""
        with self._lock:
            there = Counter(path.stat().st_size for path in self._folder.iterdir())
        for nbytes in sizes:
            if is_stopped():
                return
            if there[nbytes]:
                there[nbytes] -= 1
                continue
            # readers map all files in the folder, so create it elsewhere
            made = self._folder.parent / f"{_MAKING}{uuid.uuid4().hex}"
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                made.rename(self._folder / uuid.uuid4().hex)
            except OSError as error:
                made.unlink()
                if error.errno not in DISK_FULL:
                    raise
                logger.info("the next version takes new memory, and longer: %s", error)
                return
            finally:
                os.close(fd)

    def paths(self) -> Iterator[Path]:
        """Yield the files. Each may be taken for a version meanwhile. Raises OSError."""
        yield from self._folder.iterdir()

    def keep_only(self, sizes: Collection[int]) -> None:
        """Remove files of other sizes. Raises OSError."""
        with self._lock:
            for path in self._folder.iterdir():
                if path.stat().st_size not in sizes:
                    path.unlink()

    def remove(self) -> None:
        """Remove all spare files. Raises OSError."""
        with self._lock:
            remove_tree(self._folder)


def _nobody_reads(path: Path) -> bool:
    """Return True if no process reads the file. A process that opens it later notices the rename: see
    ``open_version_file``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        logger.info("%s is being read still, and is not used again", path)
        return False
    finally:
        os.close(fd)
