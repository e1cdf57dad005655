"""Check that vLLM's CPU attention can read an FP8 KV cache. vLLM 0.32 needs AVX-512 or AMX
(v1/attention/backends/cpu_attn.py); without them an engine would die at its start."""

import torch
from vllm.platforms import current_platform

_ONE_OF = ("avx512_f", "amx_tile")


def why_no_fp8_cache() -> str | None:
    """Return the reason why an engine here cannot have an FP8 KV cache. None: it can, or there is a GPU."""
    if not current_platform.is_cpu():
        return None
    has = torch.cpu.get_capabilities()
    if any(has.get(feature) for feature in _ONE_OF):
        return None
    return f"vLLM reads an FP8 KV cache with AVX-512 or AMX, and this processor ({has.get('cpu_name')}) has neither"
