"""What a user gets: `rollout-service serve FOLDER` and `push_weights("next", model.state_dict())`, with no options.

    python -m benchmarks.update.shipped [--replicas 1] [--transport auto --transport http --transport http:trainer]

Writes random weights of a published shape, starts the service as it comes, and pushes a transformers model from the
last GPU while rollouts run. A transport is one of ``push_weights``; ``:trainer`` has the trainer quantize. With two or
more replicas, one is killed at the end, to time the start of another beside those that serve. Each start and each
transport is a case of benchmarks/results/<machine>/update_shipped.json. With `--model tiny` it runs on a CPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.processes import raise_at_sigterm
from benchmarks.common.shipped_service import ServedOptions, shipped_service, wait_until_ready
from benchmarks.soak.strike import victims
from benchmarks.update.busy import rollouts
from benchmarks.update.pushes import pushed, pushed_sharded, trainer_model
from rollout_service.client import SyncRolloutClient

SAME = ("model", "replicas", "tensor_parallel", "ranks", "gpu_share", "transport")
CONCURRENT = 64  # rollouts under way


class ShippedOptions(ServedOptions):
    """What is measured."""

    replicas: int = 1
    ranks: int = 1
    """GPUs of the trainer, the last ones; more than one: FSDP2 shards the model over them."""
    starts: int = 1
    """Starts of the service one after the other; pushes go to the last. On a fresh host the first compiles."""
    transport: tuple[str, ...] = ("auto", "http", "http:trainer", "delta")
    pushes: int = 7
    """By each transport."""


def main(asked: ShippedOptions) -> None:
    """Start the shipped service, push, and write the result."""
    raise_at_sigterm()
    model = asked.model_folder()
    sizes: dict[str, Any] = {"model": asked.model, "replicas": asked.replicas, "gpu_share": asked.gpu_share}
    sizes |= {name: of for name in ("tensor_parallel", "ranks") if (of := getattr(asked, name)) > 1}
    for again in range(asked.starts):
        with shipped_service(asked, str(asked.replicas)) as (url, start), SyncRolloutClient(url) as client:
            fleet = client.fleet()
            where = None if fleet.log is None else fleet.log.model_dump(mode="json")
            common = sizes | {"staging": fleet.replicas[0].staging}
            _keep(common | {"transport": f"start {again + 1}", **start, "log": where})
            if again + 1 < asked.starts:
                continue
            with rollouts(url, CONCURRENT):
                for transport, timings in _pushes(asked, model, url, client):
                    _keep(common | {"transport": transport, **timings})
            if asked.replicas > 1:
                before = frozenset(replica.replica_id for replica in client.fleet().replicas)
                victims()["replica"][0].kill()
                start_s = wait_until_ready(client, asked.replicas, before)
                _keep(common | {"transport": "another replica", "start_s": start_s})


def _pushes(
    asked: ShippedOptions, model: Path, url: str, client: SyncRolloutClient
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each transport and its timings."""
    if asked.ranks > 1:
        for transport in asked.transport:
            yield transport, pushed_sharded(model, url, transport, asked.pushes, asked.ranks)
        return
    device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    trainer = trainer_model(model, device)
    for transport in asked.transport:
        yield transport, pushed(client, trainer, transport, asked.pushes)


def _keep(case: dict[str, Any]) -> None:
    results.add("update_shipped", [case], SAME)


if __name__ == "__main__":
    run(main)
