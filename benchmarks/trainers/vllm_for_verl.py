"""Lets vLLM 0.32 take a keyword of older releases that verl 0.9.1 sends, so that both sides run the same vLLM.

verl 0.9.1 aborts running requests with ``pause_generation(wait_for_inflight_requests=False)``. Newer vLLM says it by
``mode="abort"``, its default. verl imports this module in each process of its own sides: ``VERL_USE_EXTERNAL_MODULES``.
"""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

_pause = AsyncLLM.pause_generation


async def _pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **given: Any) -> None:
    await _pause(self, mode="wait" if wait_for_inflight_requests else "abort", **given)


AsyncLLM.pause_generation = _pause_generation
