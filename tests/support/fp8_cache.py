"""Which tests need an engine with an FP8 KV cache, and which take the one that this machine's engines can have."""

from typing import Literal

import pytest

from rollout_service.engine.cpu.processor import why_no_fp8_cache

_WHY_NOT = why_no_fp8_cache()
CACHE_DTYPE: Literal["fp8_e4m3", "bfloat16"] = "fp8_e4m3" if _WHY_NOT is None else "bfloat16"
"""``kv_cache.dtype`` of an engine whose cache is in FP8 wherever it can be."""
needs_fp8_cache = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
"""For tests that are about that cache or its scales."""
