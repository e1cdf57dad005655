"""End vLLM's processes with the replica that started them, however it ends, and without delay.

vLLM stops its engine process on request, but a killed replica cannot send a request. Linux can send a signal to a
process when its parent dies (prctl PR_SET_PDEATHSIG).
"""

import atexit
import ctypes
import multiprocessing
import platform
import signal

from rollout_service.runtime.drain import end_process

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> bool:
    """Let the kernel kill this process when its parent dies. Returns False unless this is a ``multiprocessing``
    child."""
    if platform.system() != "Linux" or multiprocessing.parent_process() is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return True


def skip_finalization() -> bool:
    """Let this process end as a forked one does: without Python's last garbage collection. Returns False unless this is
    a ``multiprocessing`` child, whose exit status becomes 1."""
    if multiprocessing.parent_process() is None:
        return False
    # a replica waits for its engine and each worker in turn, and the collection takes each of them 2.5 s
    atexit.register(end_process, 1)
    return True
