"""Request permission to use AMX, which vLLM's CPU attention needs but does not request.

Linux requires a permission per process for tile registers (``arch_prctl(ARCH_REQ_XCOMP_PERM)``, Linux's
Documentation/arch/x86/xstate.rst). vLLM 0.32 chooses AMX attention by CPUID alone. Without the permission, the first
attention of a BF16 engine dies of SIGILL.
"""

import ctypes
import platform
from pathlib import Path

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def request_amx() -> bool:
    """Request the permission for this process and its threads. Return False if the processor has no AMX.

    Raises OSError if the processor has AMX but the kernel refuses.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) != 0:
        raise OSError(ctypes.get_errno(), "this processor has AMX but the kernel does not let processes use it")
    return True
