"""Memory of one machine that several workers map: the replicas of a node stage a version once, not each for itself.

It is anonymous (``memfd_create``), so that nothing of it is left when its last process has ended, however it ended. A
process finds it through the others: a small file lists who has it open, and ``/proc/<pid>/fd/<number>`` opens it again.
In front of the area lies a header that says what the area holds. ``flock`` on the memory itself orders its users: who
loads from the area shares the lock, who writes into it has it alone, and the kernel frees the lock of a dead process.
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
"""How long one waits for others: for those who load from the area, from when they have checked a version until they
have loaded it, and for the one who reads a version into it. That is seconds, unless a process was stopped meanwhile."""
_POLL_S = 0.02
"""``flock`` cannot wait for a limited time."""


class Busy(Exception):
    """Others load another version from the memory, and have not ended in time."""


class Content(Frozen):
    """What lies in an area."""

    digest: str
    """Of the version's manifest."""
    placement: str
    """Where its bytes lie: ``Placement.digest``."""
    every: bool
    """Whether all other bytes of the version were checked, too."""

    def serves(self, wanted: "Content") -> bool:
        """Who wants that need not read anything."""
        return (self.digest, self.placement) == (wanted.digest, wanted.placement) and self.every >= wanted.every


class SharedMemory:
    """One process's mapping of it."""

    def __init__(self, name: str, nbytes: int, *, folder: Path | None = None) -> None:
        """Map the memory of this name and size that another process of this user has, or make it.

        ``folder``: where processes find each other; None: one of this user's among temporary files. Raises OSError.
        """
        self._fd, self.is_new = _joined(f"rollout-{name}-{nbytes}", HEADER_BYTES + nbytes, folder or _own_folder())
        try:
            self._map = mmap.mmap(self._fd, HEADER_BYTES + nbytes)
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise OSError(f"no {nbytes} bytes of shared memory can be mapped: {error}") from error
        weakref.finalize(self, os.close, self._fd)  # the mapping lives as long as tensors refer to it
        self.area = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
        """uint8 [nbytes], and page-aligned."""

    def hold(self, wanted: Content, write: Callable[[], object], limit_s: float = HOLD_LIMIT_S) -> None:
        """Have ``wanted`` in the area, and keep it there until ``release``.

        ``write`` puts it there if it is not there yet; what it raises leaves the area empty. Raises Busy.
        """
        self.release()
        deadline = time.monotonic() + limit_s
        while True:
            if self._try_lock(fcntl.LOCK_SH):
                if self._holds(wanted):
                    return
                self.release()
                # not waited for: another who writes the same keeps sharing it, for all who look again
                if self._try_lock(fcntl.LOCK_EX):
                    self._write(wanted, write)
                    continue
            if time.monotonic() >= deadline:
                raise Busy(f"other replicas of this node have used the shared staging area for {limit_s:g} s")
            time.sleep(_POLL_S)

    def _write(self, wanted: Content, write: Callable[[], object]) -> None:
        """With the area to oneself, which it is not afterwards: to share it is another lock."""
        try:
            if not self._holds(wanted):  # another may have written it since this one looked
                self._note(None)
                write()
                self._note(wanted)
        finally:
            self.release()

    def release(self) -> None:
        """Others may write into it."""
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
    """Raises PermissionError if somebody else could have put something there."""
    folder = Path(tempfile.gettempdir()) / f"rollout-service-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone: remove it")
    return folder


def _joined(name: str, nbytes: int, folder: Path) -> tuple[int, bool]:
    """A file descriptor of the memory, and whether it was made here; all who come at the same time get the same."""
    with (folder / f"{name}.holders").open("a+") as holders:
        fcntl.flock(holders, fcntl.LOCK_EX)
        holders.seek(0)
        fd, alive = None, []
        for line in holders.read().splitlines():
            opened = _opened(line, name, nbytes)
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


def _opened(holder: str, name: str, nbytes: int) -> int | None:
    """The memory as a process that had it still has it; its number may be another process's by now."""
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
