"""Durable writes, and the lock that makes one process the only writer."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self, TypeVar

import xxhash

from rollout_service.errors import InsufficientStorage, LogCorrupt, LogLocked, RolloutServiceError

logger = logging.getLogger(__name__)

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for a full disk."""
PASSING = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Error numbers of reads that may succeed later."""
_LOCK_POLL_S = 0.05
_Read = TypeVar("_Read")


class WriterLock:
    """An exclusive lock on a log's root. The kernel releases it when its process ends, in whatever way."""

    def __init__(self, root: Path, name: str = "LOCK", setting: str = "weights.root") -> None:
        """``setting``: the one that names the folder, for messages."""
        self._path, self._setting = root / name, setting
        self._fd: int | None = None

    def acquire(self, timeout_s: float) -> Self:
        """Wait at most ``timeout_s`` seconds for another writer to end.

        Raises LogLocked, which names that writer, or OSError, for example if the disk is full.
        """
        deadline = time.monotonic() + timeout_s
        while self._fd is None:
            fd = self._open()
            try:
                require_own(self._path)
                self._wait(fd, deadline, timeout_s)
                # the writer before may have removed the folder: nobody else would wait for the lock of a removed file
                if _is_file_at(fd, self._path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
                    self._fd = fd
            finally:
                if self._fd is None:
                    os.close(fd)
        return self

    def _open(self) -> int:
        make_private(self._path.parent)
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _not_ours(self._path, "is a symbolic link") from error

    def _wait(self, fd: int, deadline: float, timeout_s: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 100, 0).decode(errors="replace").strip()
                    raise LogLocked(
                        f"{self._path.parent} is being written by {holder or 'another process'}, and still was after "
                        f"{timeout_s:g} s: stop that one, or name another {self._setting}"
                    ) from None
            time.sleep(_LOCK_POLL_S)

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_shared(folder: Path) -> int:
    """Return a descriptor that holds a shared lock on a folder until it is closed. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:  # the file system has no locks
        os.close(fd)
        raise
    return fd


def is_unlocked(path: Path) -> bool:
    """Return True if no process holds a lock on a folder or file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def make_private(folder: Path) -> None:
    """Create a folder that only this user can read, if it does not exist. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def require_own(path: Path) -> None:
    """Raise LogLocked if another user may have created ``path``, or one of its parent folders.

    In folders such as /dev/shm and /tmp, every user may create files and only remove own ones. There, only files of
    this user and of root are trusted. In other folders owners are not checked, since NFS maps them.
    """
    trusted, shared = {os.geteuid(), 0}, stat.S_IWOTH | stat.S_ISVTX
    path = path.absolute()
    for child in (path, *path.parents):
        if child.parent.stat().st_mode & shared == shared and (owner := child.lstat().st_uid) not in trusted:
            raise _not_ours(child, f"belongs to user {owner}, in a folder where everybody may make one")


def _not_ours(path: Path, why: str) -> LogLocked:
    return LogLocked(f"{path} {why}: it is not used for a weight log; remove it, or name another weights.root")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_synced(path: Path, text: str | bytes) -> None:
    """Write ``text`` and return once it is on disk. A new file is private to this user; links are not followed."""
    with open(path, "wb", opener=_private) as stream:
        stream.write(text.encode() if isinstance(text, str) else text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_synced(path: Path, text: str) -> OSError | None:
    """Replace ``path`` by a file with ``text``, atomically and durably. Raises OSError if ``path`` is unchanged.

    Return the error of a disk that did not confirm the folder afterwards. Readers see the new file by then, so it
    counts, but a power failure may restore the old one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, text)
    os.replace(temporary, path)
    try:
        sync_folder(path.parent)
    except OSError as error:
        logger.error(
            "%s is replaced, but the disk did not confirm its folder (%s): a power failure may bring back what was "
            "there before", path, error,
        )  # fmt: skip
        return error
    return None


def remove_tree(path: Path) -> bool:
    """Remove an unneeded folder or file as far as possible. Return True if all of it is gone.

    On NFS a file that some process has open stays, as ``.nfs…``, until that process closes it.
    """
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return True
    try:
        path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed yet, and is tried again later: %s", path, error)
        return False
    return True


def write_sealed(path: Path, text: str) -> None:
    """Replace ``path`` durably and atomically by ``text``, one line, followed by a line with its xxh3-128."""
    replace_synced(path, f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n")


def read_sealed(path: Path) -> str | None:
    """Read the text of ``write_sealed``; None if there is no file. Raises LogCorrupt for a damaged file."""
    try:
        text, _, digest = path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise LogCorrupt(f"{path} does not parse: {error}") from error
    if xxhash.xxh3_128_hexdigest(text.encode()) != digest:
        raise LogCorrupt(f"{path} does not hash to the digest on its last line")
    return text


def read_thrice(read: Callable[[], _Read], passing: Collection[int]) -> _Read:
    """Return the result of ``read``, tried up to three times if its error number is in ``passing``. Raises OSError."""
    for _ in range(2):
        try:
            return read()
        except OSError as error:
            if error.errno not in passing:
                raise
    return read()


def sync_folder(folder: Path) -> None:
    """Return once renames and new files in ``folder`` are on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remedy(error: OSError, otherwise: str) -> str:
    """Return what helps against a failed write: permissions, or ``otherwise``."""
    is_denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "make that folder writable for the service" if is_denied else otherwise


def not_written(what: str, error: OSError, otherwise: str) -> RolloutServiceError:
    """Return the error for a failed write, with what helps against it; ``otherwise``: see ``remedy``."""
    return RolloutServiceError(f"{what}: {error}; {remedy(error, otherwise)}")


def no_room(what: str, folder: Path, needed_bytes: int) -> InsufficientStorage:
    """Return the error for a full disk, with needed and free bytes."""
    free_bytes = shutil.disk_usage(folder).free
    # what was written before the failure is removed by now, and is free again
    why = "" if free_bytes < needed_bytes else ", which whole blocks, a quota or another writer take up"
    return InsufficientStorage(
        f"{what} needs {needed_bytes} bytes, and {folder} has {free_bytes} free{why}: make room there and send it "
        "again; what is committed or staged stays",
        {"needed_bytes": needed_bytes, "free_bytes": free_bytes},
    )
