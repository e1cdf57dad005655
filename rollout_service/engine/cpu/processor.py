"""Requirements of vLLM's CPU attention: a permission for AMX, and vector instructions for an FP8 KV cache."""

import ctypes
import platform
from pathlib import Path

import torch
from vllm.platforms import current_platform

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def request_amx() -> bool:
    """Request the permission for this process and its threads. Return False if the processor has no AMX.

    Linux requires a permission per process for tile registers (``arch_prctl(ARCH_REQ_XCOMP_PERM)``, Linux's
    Documentation/arch/x86/xstate.rst). vLLM 0.32 chooses AMX attention by CPUID alone. Without the permission, the
    first attention of a BF16 engine dies of SIGILL.

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


def why_no_fp8_cache() -> str | None:
    """Return the reason why an engine here cannot have an FP8 KV cache. None: it can, or there is a GPU.

    vLLM 0.32 needs AVX-512 or AMX (v1/attention/backends/cpu_attn.py); without them an engine would die at its start.
    """
    if not current_platform.is_cpu():
        return None
    has = torch.cpu.get_capabilities()
    if has.get("avx512_f") or has.get("amx_tile"):
        return None
    return f"vLLM reads an FP8 KV cache with AVX-512 or AMX, and this processor ({has.get('cpu_name')}) has neither"
