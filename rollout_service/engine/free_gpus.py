"""Wait for free memory on a replica's GPUs, which another process such as a trainer may hold."""

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Sequence

from rollout_service.gpu import nvidia_smi

logger = logging.getLogger(__name__)

POLL_S = 5.0
_ALONE_S = 15.0
"""Minimum wait in seconds if no other replica serves. An engine that has just ended frees its memory earlier."""


class GpuTaken(RuntimeError):
    """Raised when another process holds the memory of a GPU that Ray assigned to this replica."""


async def wait_for_free_gpus(
    devices: Sequence[str],
    share: float,
    tell: Callable[[str | None], None],
    others_serve: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until each GPU of ``devices`` has the fraction ``share`` of its memory free.

    A waiting replica keeps the GPU reserved in Ray, so that the next replica gets another one. If it failed instead,
    Serve would start replicas forever, possibly on the same GPU.

    Raises GpuTaken if no other replica serves.

    Args:
        devices: GPU ids, as Ray names them.
        share: ``engine.gpu_memory_utilization``.
        tell: called with the reason for the wait, and with None at the end.
        others_serve: returns True if another replica serves.
        sleep: waits for the given seconds.
    """
    waited_s, told = 0.0, False
    while (why := await asyncio.to_thread(why_taken, devices, share)) is not None:
        tell(why)
        if waited_s >= _ALONE_S and not await others_serve():
            advice = "start Ray with a CUDA_VISIBLE_DEVICES without that GPU, or lower engine.gpu_memory_utilization"
            raise GpuTaken(f"{why}: end that process, {advice}")
        if not told:
            logger.warning("no engine is started here until the memory is free: %s", why)
            told = True
        await sleep(POLL_S)
        waited_s += POLL_S
    if told:
        logger.info("the memory of GPU %s is free, and the engine starts", ", ".join(devices))
    tell(None)


def why_taken(devices: Sequence[str], share: float) -> str | None:
    """Return the GPUs with too little free memory and the processes that hold it. None: all have enough."""
    try:
        ours = nvidia_smi.select_gpus(nvidia_smi.gpus(), ",".join(devices)) if devices else ()
        found = nvidia_smi.find_taken(ours, nvidia_smi.holders(), share) if ours else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning("it is not known whether the GPU has free memory; vLLM will tell: %s", error)
        return None
    return "; ".join(f"GPU {index}: {why}" for index, why in found.items()) or None
