"""vLLM's processes end with the replica that started them, whatever way it ends.

vLLM stops its engine process when it is asked to; a replica that is killed cannot ask. Linux can send a signal to a
process when its parent dies (prctl PR_SET_PDEATHSIG).
"""

import ctypes
import multiprocessing
import platform
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> bool:
    """Have this process killed when its parent dies. Only a ``multiprocessing`` child asks; False for any other."""
    if platform.system() != "Linux" or multiprocessing.parent_process() is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return True
