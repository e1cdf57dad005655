"""Files in memory that the next versions are written to: made at the start, then those of dropped versions.

Only where the log is in memory: new pages of a tmpfs cost more than all the rest of a version, and a process that has a
file mapped and registered with CUDA has it still under its next name (``mapped_files.py``). They lie in
``<root>/spare``. Once a version was dropped, its files replace all others there.
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
    """Those of one log. Used by its only writer; threads may share it."""

    def __init__(self, root: Path) -> None:
        """``root``: of the log."""
        self._folder = root / "spare"
        self._lock = threading.Lock()

    @staticmethod
    def are_kept_in(root: Path) -> bool:
        """Whether the log's writer uses files again: readers then may map them."""
        return (root / "spare").is_dir() and is_in_memory(root)  # the folder may have been copied from elsewhere

    def begin(self) -> None:
        """Have readers know that files are used again. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.parent.glob(f"{_MAKING}*"):  # of a process that was killed
            unfinished.unlink()

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

    def make(self, sizes: Iterable[int], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Make a file of each size in bytes, unless there is one already, until memory is full. Raises OSError."""
        with self._lock:
            there = Counter(path.stat().st_size for path in self._folder.iterdir())
        for nbytes in sizes:
            if is_stopped():
                return
            if there[nbytes]:
                there[nbytes] -= 1
                continue
            made = self._folder.parent / f"{_MAKING}{uuid.uuid4().hex}"  # a reader maps what it finds in the folder
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
        """Give the memory of files of other sizes back. Raises OSError."""
        with self._lock:
            for path in self._folder.iterdir():
                if path.stat().st_size not in sizes:
                    path.unlink()

    def remove(self) -> None:
        """Use no files again. Raises OSError."""
        with self._lock:
            remove_tree(self._folder)


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
