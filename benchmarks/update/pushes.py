"""A trainer's model and its pushes, timed; also of a trainer that FSDP2 shards over the last GPUs of the host.

    python -m benchmarks.update.pushes MODEL URL TRANSPORT PUSHES RANK RANKS STORE

is one rank of a sharded trainer; ``benchmarks.update.shipped --ranks 2`` starts them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.processes import OFFLINE
from rollout_service.client import SyncRolloutClient

_LIMIT_S = 600
FIRST_PUSHES = 3  # told apart from later ones, whose median is the headline


def trainer_model(model: Path, device: str) -> torch.nn.Module:
    """Return a BF16 model with random weights on the device."""
    with torch.device(device):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        )
    return made


def pushed(
    client: SyncRolloutClient, trainer: torch.nn.Module, transport: str, pushes: int, *, send: bool = True
) -> dict[str, Any]:
    """Push versions whose weights all differ a little; return the seconds of each, and how long engines closed."""
    name, _, quantizer = transport.partition(":")
    options: dict[str, Any] = {"transport": name, "send": send} | ({"quantize": quantizer} if quantizer else {})
    push_s, closed_s, sent = list[float](), list[float](), list[int]()
    for _ in range(pushes):
        with torch.no_grad():
            for weights in trainer.parameters():
                local = weights.to_local() if hasattr(weights, "to_local") else weights  # the shard of this rank
                local.add_(torch.randn_like(local) * 1e-5 * local.abs().mean())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        status = client.push_weights("next", trainer.state_dict(), **options)
        push_s.append(time.perf_counter() - started)
        if status is not None:
            closed_s.append(max(replica.update.closed_s for replica in client.fleet().replicas if replica.update))
            sent.append(status.uploaded_bytes or 0)
        time.sleep(1.0)  # a trainer's step lasts longer
    return {
        "first_push_s": push_s[:FIRST_PUSHES],
        "push_s": push_s[FIRST_PUSHES:],
        "median_push_s": statistics.median(push_s[FIRST_PUSHES:] or push_s),
        "closed_s": closed_s,
        "uploaded_bytes": sent[-1] if sent else 0,
    }


def pushed_sharded(model: Path, url: str, transport: str, pushes: int, ranks: int) -> dict[str, Any]:
    """Push from so many ranks; return what ``pushed`` returns on the first. Raises RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.update.pushes", str(model), url, transport, str(pushes)]
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
