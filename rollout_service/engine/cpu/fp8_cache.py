"""Whether vLLM's attention on this processor reads an FP8 KV cache: in vLLM 0.32 with AVX-512 or AMX alone
(v1/attention/backends/cpu_attn.py). Without them an engine would die as it starts."""

import torch
from vllm.platforms import current_platform

_ONE_OF = ("avx512_f", "amx_tile")


def why_no_fp8_cache() -> str | None:
    """Why an engine here has no FP8 KV cache; None: it can have one, or there is a GPU."""
    if not current_platform.is_cpu():
        return None
    has = torch.cpu.get_capabilities()
    if any(has.get(feature) for feature in _ONE_OF):
        return None
    return f"vLLM reads an FP8 KV cache with AVX-512 or AMX, and this processor ({has.get('cpu_name')}) has neither"
