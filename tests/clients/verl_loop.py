"""verl's own classes around the plugin, as its asynchronous trainers use them, in a Ray of their own without a GPU.

    python -m tests.clients.verl_loop URL MODEL RESULT

Two ranks of a trainer hold halves of telltale weights. Their updates go through verl's CheckpointEngineManager, and
rollouts through its FullyAsyncLLMServerClient, while it all runs.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed
import verl
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput

from rollout_service.client import RolloutClient
from tests.clients.verl_settings import LONG, STEPS
from tests.support.telltale import canary_weights

NUM_RANKS = 2
NUM_LONG = 4
PROMPT = [9, 10, 11]


class Trainer(Worker):
    """What ActorRolloutRefWorker of verl 0.9.1 has around a checkpoint engine, verl/workers/engine_workers.py."""

    def __init__(self, rollout: Any, model: str) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=120, backend="cpu:gloo")
        self._mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._model, self._update = Path(model), 0
        engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs.get(engine.backend, {}),
        )

    def _weights(self, told: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in canary_weights(self._model, told).items():
            yield name, distribute_tensor(tensor, self._mesh, [Shard(0)]).full_tensor()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        self._update += 1
        return await self.checkpoint_engine.send_weights(self._weights(self._update), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


def configuration(url: str, model: str) -> DictConfig:
    """verl's own, with the lines of docs/trainers/verl.md."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    lines = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=rollout_service",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout_service",
        f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollout_service.url={url}",
    ]
    return OmegaConf.merge(config, OmegaConf.from_dotlist(lines))


def trainer_group(config: DictConfig) -> RayWorkerGroup:
    """The ranks of the trainer."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool([NUM_RANKS], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(Trainer), rollout=config.actor_rollout_ref.rollout, model=config.actor_rollout_ref.model.path
        ),
        use_gpu=False,
        device_name="cpu",
    )


async def loop(config: DictConfig, url: str) -> dict[str, Any]:
    """Updates, with rollouts between them and across one."""
    servers = await LLMServerManager.create(config=config)
    manager = CheckpointEngineManager(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=trainer_group(config),
        replicas=servers.get_replicas(),
    )
    client = servers.get_client(client_cls=FullyAsyncLLMServerClient)

    async def generate(max_tokens: int) -> TokenOutput:
        sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True}
        return await client.generate(
            "session", prompt_ids=PROMPT, sampling_params={**sampling, "max_tokens": max_tokens}
        )

    metrics = [await manager.update_weights(STEPS[0])]
    short = [await generate(8)]
    metrics.append(await manager.update_weights(STEPS[1]))
    short.append(await generate(8))
    across = [asyncio.create_task(generate(LONG)) for _ in range(NUM_LONG)]
    async with RolloutClient(url) as service:
        while sum(replica.running for replica in (await service.fleet()).replicas) < NUM_LONG:
            await asyncio.sleep(0.05)
    metrics.append(await manager.update_weights(STEPS[2]))
    long = await asyncio.gather(*across)
    return {
        "metrics": metrics,
        "short": [output.model_dump() for output in short],
        "long": [output.model_dump() for output in long],
        "addresses": servers.get_addresses(),
    }


def main(url: str, model: str, result: str) -> None:
    ray.init("local", num_cpus=16, include_dashboard=False)
    try:
        found = asyncio.run(loop(configuration(url, model), url))
    finally:
        ray.shutdown()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
