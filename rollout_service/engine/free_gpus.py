"""The wait of a replica for the memory of its GPUs: another process, such as a trainer's, may hold it."""

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Sequence

from rollout_service.gpu import nvidia_smi

logger = logging.getLogger(__name__)

POLL_S = 5.0
_ALONE_S = 15.0
"""The wait where no other replica serves. Memory of an engine that has just ended is free before."""


class GpuTaken(RuntimeError):
    """Another process holds the memory of a GPU that Ray gave to this replica."""


async def wait_for_free_gpus(
    devices: Sequence[str],
    share: float,
    tell: Callable[[str | None], None],
    others_serve: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until each GPU of ``devices`` has ``share`` of its memory free.

    A replica that waits keeps the GPU's place in Ray, so that the next replica gets another one. If it failed, Serve
    would start replicas without end, and Ray could give them the same GPU again.

    ``devices``: as Ray names them. ``share``: ``engine.gpu_memory_utilization``. ``tell``: takes the reason, and None
    at the end. Raises GpuTaken if no other replica serves.
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
    """Return which of ``devices`` have too little free memory, and who holds it; None: all have enough."""
    try:
        ours = nvidia_smi.named(nvidia_smi.gpus(), ",".join(devices)) if devices else ()
        found = nvidia_smi.taken(ours, nvidia_smi.holders(), share) if ours else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning("it is not known whether the GPU has free memory; vLLM will tell: %s", error)
        return None
    return "; ".join(f"GPU {index}: {why}" for index, why in found.items()) or None
