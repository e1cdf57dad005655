"""Two ranks that push the same sharded weights. ``python -m tests.unit.client.two_ranks STORE URL`` is the second."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError

ROOT = Path(__file__).parents[3]
NUM_TENSORS = 6
PUSHES: tuple[tuple[int, Literal["service", "trainer"], Literal["http", "delta"]], ...] = (
    *((version, "service", "http") for version in (1, 2, 3)),
    *((version, "trainer", "http") for version in (4, 5, 6)),
    *((version, "trainer", "delta") for version in (7, 8, 9)),
)
"""Versions, who quantizes them, and whether all is sent of them or what has changed."""


def whole_tensors() -> dict[str, torch.Tensor]:
    """What both ranks hold a half of."""
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}": torch.randn(10, 64, generator=generator) for i in range(NUM_TENSORS)}


def join(rank: int, store: str) -> dict[str, DTensor]:
    """Meet the other rank and share the tensors out."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole_tensors().items()}


async def on_both_ranks(
    module: str, run: Callable[[int, str, str], Awaitable[list[str]]], store: Path, url: str
) -> tuple[list[str], str]:
    """Let ``run`` be rank 0 here, and ``module`` rank 1 in another process. Return the outcomes and its output."""
    second_rank = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(store), url), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    outcomes = await run(0, str(store), url)
    output, _ = await second_rank.communicate()
    return outcomes, output.decode()


async def push_all(rank: int, store: str, url: str) -> list[str]:
    """How each push ended on this rank."""
    outcomes = []
    sharded = await asyncio.to_thread(join, rank, store)
    async with RolloutClient(url) as client:
        for version, quantize, transport in PUSHES:
            try:
                status = await client.push_weights(
                    version, sharded, quantize=quantize, transport=transport, send=rank == 0
                )
                outcomes.append("took part" if status is None else status.state)
            except RolloutServiceError as error:
                outcomes.append(error.message)
    torch.distributed.destroy_process_group()
    return outcomes


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(repr(asyncio.run(push_all(1, sys.argv[1], sys.argv[2]))))
