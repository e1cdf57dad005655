"""verl's RolloutReplica. One replica of verl stands for the whole service, with all its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import httpx
import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollout_service.client.verl.server import RolloutServer, server_name
from rollout_service.client.verl.settings import NAME, settings_of

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import RolloutConfig

_STANDALONE_ONLY = (
    f"rollout.name={NAME} is a service on GPUs of its own and does not share the trainer's: use it with a trainer that "
    "has standalone rollouts (separate_async with actor_rollout_ref.hybrid_engine=False, one_step_off_policy or "
    "fully_async)"
)


class RolloutServiceReplica(RolloutReplica):
    """Implements ``rollout.name=rollout_service`` of verl 0.9.1, verl/workers/rollout/replica.py.

    It takes no GPU of verl's cluster. It has the server, and one worker without a GPU for verl's checkpoint manager.
    verl creates ``n_gpus_per_node × nnodes / tensor_model_parallel_size`` replicas; that must be one.
    """

    def __init__(
        self, replica_rank: int, config: RolloutConfig, model_config: DictConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise NotImplementedError(f"rollout.name={NAME} serves the policy, not a reward model or a teacher")
        num_replicas = self.config.n_gpus_per_node * self.config.nnodes // self.world_size
        if num_replicas > 1:
            raise ValueError(
                f"verl would make {num_replicas} replicas of rollout.name={NAME}, but one represents the whole "
                "service: set rollout.nnodes=1, rollout.n_gpus_per_node=1 and rollout.tensor_model_parallel_size=1; "
                "scaling.max_replicas of the service sets the number of engines"
            )
        self._settings = settings_of(self.config.checkpoint_engine.engine_kwargs)

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> NoReturn:
        """Raise NotImplementedError: the service has its own GPUs."""
        raise NotImplementedError(_STANDALONE_ONLY)

    async def init_hybrid_colocated(self, worker_group: RayWorkerGroup, resource_pool: RayResourcePool) -> NoReturn:
        """Raise NotImplementedError: the service has its own GPUs."""
        raise NotImplementedError(_STANDALONE_ONLY)

    async def init_colocated(self, resource_pool: RayResourcePool) -> NoReturn:
        """Raise NotImplementedError: the service has its own GPUs."""
        raise NotImplementedError(_STANDALONE_ONLY)

    async def init_standalone(self) -> None:
        """Start one worker and the server, without a GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool(
            [1], use_gpu=False, max_colocate_count=1, name_prefix=f"{NAME}_{self.replica_rank}"
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"{NAME}_worker_{self.replica_rank}",
            use_gpu=False,
            device_name="cpu",
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the actor that verl's clients call."""
        server = (
            ray.remote(RolloutServer)
            .options(name=server_name(self.replica_rank), max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(self._settings, self.config.prompt_length, self.config.response_length, self.config.max_model_len)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = httpx.URL(self._settings.url).netloc.decode()
