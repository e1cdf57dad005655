"""Memory shared by the workers of one machine, so that the replicas of a node stage a version once.

The memory is anonymous (``memfd_create``), so it disappears with its last process. A process finds it through others: a
small file lists the processes that have it open, and ``/proc/<pid>/fd/<number>`` opens it again. A header before the
staging buffer describes its content. ``flock`` on the memory orders its users: loading takes a shared lock, writing an
exclusive one. The kernel releases the lock of a dead process.
"""

import fcntl
import mmap
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError

from rollout_service.protocol.base import Frozen

HEADER_BYTES = mmap.PAGESIZE
HOLD_LIMIT_S = 120.0
"""Maximum wait in seconds for other processes: those loading from the buffer, and the one reading a version into it.
Both take seconds unless a process is stopped."""
_POLL_S = 0.02
"""Seconds between two attempts to lock. ``flock`` itself has no timeout."""


class Busy(Exception):
    """Raised when other processes have used the memory for another version too long."""


class Content(Frozen):
    """Description of the data in a staging buffer."""

    digest: str
    """Digest of the version's manifest."""
    placement: str
    """Digest of the layout, see ``Placement.digest``."""
    every: bool
    """True if all other bytes of the version were checked, too."""

    def serves(self, wanted: "Content") -> bool:
        """Return True if the buffer already holds ``wanted``."""
        return (self.digest, self.placement) == (wanted.digest, wanted.placement) and self.every >= wanted.every


class SharedMemory:
    """One process's mapping of the shared memory."""

    def __init__(self, name: str, nbytes: int, *, folder: Path | None = None) -> None:
        """Map the memory with this name and size, shared among this user's processes, or create it.

        Raises OSError.

        ``folder``: the folder with the file that lists processes. None: this user's folder for temporary files.
        """
        self._fd, self.is_new = _open_or_create(
            f"rollout-{name}-{nbytes}", HEADER_BYTES + nbytes, folder or _own_folder()
        )
        try:
            self._map = mmap.mmap(self._fd, HEADER_BYTES + nbytes)
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise OSError(f"no {nbytes} bytes of shared memory can be mapped: {error}") from error
        weakref.finalize(self, os.close, self._fd)  # the mapping lives as long as tensors refer to it
        self.area = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
        """The staging buffer, uint8 [nbytes], page-aligned."""

    def hold(self, wanted: Content, write: Callable[[], object], limit_s: float = HOLD_LIMIT_S) -> None:
        """Put ``wanted`` into the buffer, and keep it there until ``release``.

        ``write`` is called if the buffer does not hold it yet. If ``write`` raises, the buffer is empty. Raises Busy.
        """
        self.release()
        deadline = time.monotonic() + limit_s
        while True:
            if self._try_lock(fcntl.LOCK_SH):
                if self._holds(wanted):
                    return
                self.release()
                # no wait: another writer of the same content will share it with all that check again
                if self._try_lock(fcntl.LOCK_EX):
                    self._write(wanted, write)
                    continue
            if time.monotonic() >= deadline:
                raise Busy(f"other replicas of this node have used the shared staging area for {limit_s:g} s")
            time.sleep(_POLL_S)

    def _write(self, wanted: Content, write: Callable[[], object]) -> None:
        """Write with the exclusive lock, and release it. Sharing needs another lock."""
        try:
            if not self._holds(wanted):  # another process may have written it since the last check
                self._note(None)
                write()
                self._note(wanted)
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock, so that other processes may write."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holds(self, wanted: Content) -> bool:
        text = self._map[:HEADER_BYTES].rstrip(b"\0")
        try:
            return bool(text) and Content.model_validate_json(text).serves(wanted)
        except ValidationError:  # a process died while it wrote the header
            return False

    def _note(self, content: Content | None) -> None:
        text = b"" if content is None else content.model_dump_json().encode()
        self._map[:HEADER_BYTES] = text.ljust(HEADER_BYTES, b"\0")


def _own_folder() -> Path:
    """Return this user's folder. Raises PermissionError if another user could have written to it."""
    folder = Path(tempfile.gettempdir()) / f"rollout-service-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone: remove it")
    return folder


def _open_or_create(name: str, nbytes: int, folder: Path) -> tuple[int, bool]:
    """Return a file descriptor of the memory, and True if it was created here. Concurrent callers get the same
    memory."""
    with (folder / f"{name}.holders").open("a+") as holders:
        fcntl.flock(holders, fcntl.LOCK_EX)
        holders.seek(0)
        fd, alive = None, []
        for line in holders.read().splitlines():
            opened = _open_through(line, name, nbytes)
            if opened is None:
                continue
            alive.append(line)
            if fd is None:
                fd = opened
            else:
                os.close(opened)
        is_new = fd is None
        if fd is None:
            fd = os.memfd_create(name)
            os.ftruncate(fd, nbytes)
        holders.truncate(0)
        holders.write("".join(f"{line}\n" for line in (*alive, f"{os.getpid()} {fd}")))
        return fd, is_new


def _open_through(holder: str, name: str, nbytes: int) -> int | None:
    """Open the memory through a process that had it open. Its pid may belong to another process by now."""
    try:
        pid, number = map(int, holder.split())
        link = f"/proc/{pid}/fd/{number}"
        if os.readlink(link) != f"/memfd:{name} (deleted)":
            return None
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if os.fstat(fd).st_size == nbytes:
        return fd
    os.close(fd)
    return None
