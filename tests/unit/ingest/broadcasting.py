"""A trainer that broadcasts, as the ingest meets it."""

import asyncio

import psutil

from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.weight_transfer import TransferInit
from rollout_service.protocol.weights import WeightStatus
from tests.support.gloo_trainer import GlooTrainer, update_info
from tests.unit.ingest.trainer import Weights


async def join(ingest: Ingest, trainer: GlooTrainer) -> None:
    """Both are in the group when this returns."""
    init = TransferInit.model_validate(trainer.init_info)
    await asyncio.gather(ingest.transfer.init(init), asyncio.to_thread(trainer.join))


AS_BEFORE = {"names": [], "dtype_names": [], "shapes": []}
"""The announcement of vLLM 0.33's trainer in a round that repeats the tensors of the round before."""


async def send(ingest: Ingest, trainer: GlooTrainer, weights: Weights, announced: object = None) -> None:
    """One ``/update_weights`` beside its broadcasts; raises what the ingest answers when all have been sent.

    ``announced``: the body, if it is not the table of ``weights``.
    """
    receiving = asyncio.create_task(ingest.transfer.update(announced or update_info(weights)))
    await asyncio.to_thread(trainer.broadcast, weights.items())
    await receiving


async def push(
    ingest: Ingest, trainer: GlooTrainer, weights: Weights, label: str | None = None, announced: object = None
) -> WeightStatus:
    """A whole update."""
    await ingest.transfer.start()
    await send(ingest, trainer, weights, announced)
    return await ingest.transfer.finish(label)


async def receive_nothing(ingest: Ingest, weights: Weights) -> "asyncio.Task[None]":
    """An ``/update_weights`` that waits for its broadcasts."""
    receiving = asyncio.create_task(ingest.transfer.update(update_info(weights)))
    while ingest.transfer.status().state != "receiving":
        await asyncio.sleep(0)
    return receiving


async def another_trainer_pushes(ingest: Ingest, weights: Weights) -> None:
    """A group and an update that nothing before is in the way of."""
    trainer = GlooTrainer()
    await join(ingest, trainer)
    assert (await push(ingest, trainer, weights)).version == 1
    trainer.close()


def receiver_pid() -> int:
    """Of this process's only receiver."""
    (server,) = [c for c in psutil.Process().children() if "forkserver" in " ".join(c.cmdline())]
    (child,) = server.children()
    return child.pid
