"""A trainer that FSDP2 shards over the last GPUs of the host, and its pushes of ``DTensor``s.

    python -m benchmarks.update.sharded_trainer MODEL URL TRANSPORT PUSHES RANK RANKS STORE

is one rank; ``benchmarks.update.shipped --ranks 2`` starts them.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.common.processes import OFFLINE
from benchmarks.update.pushes import pushed, trainer_model
from rollout_service.client import SyncRolloutClient

_LIMIT_S = 600


def pushed_sharded(model: Path, url: str, transport: str, pushes: int, ranks: int) -> dict[str, Any]:
    """Push from so many ranks; return what ``pushed`` returns on the first. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.update.sharded_trainer", str(model), url, transport, str(pushes)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/store"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **OFFLINE},  # noqa: TID251 - a child's
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise RuntimeError(f"ranks {failed} of the sharded trainer failed: their output is above")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def main(model: Path, url: str, transport: str, pushes: int, rank: int, ranks: int, store: str) -> None:
    """Shard the model, push, and print the result on the first rank."""
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{torch.cuda.device_count() - ranks + rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    trainer = trainer_model(model, device)
    # a mesh of ranks, not of device indices: the first GPUs are the engines'
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
    for layer in trainer.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer, mesh=mesh)
    with SyncRolloutClient(url) as client:
        found = pushed(client, trainer, transport, pushes, send=rank == 0)
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    model, url, transport, pushes, rank, ranks, store = sys.argv[1:]
    main(Path(model), url, transport, int(pushes), int(rank), int(ranks), store)
