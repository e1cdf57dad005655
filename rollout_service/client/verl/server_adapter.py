"""verl's BaseRollout beside each rollout worker. It tells the replica's server the version of each update."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import ray
from verl.workers.rollout.base import BaseRollout

from rollout_service.client.verl.checkpoint_engine import SentVersion
from rollout_service.client.verl.settings import NAME, server_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from verl.workers.config import HFModelConfig, RolloutConfig


class ServerAdapter(BaseRollout):
    """Implements ``rollout.name=rollout_service`` of verl 0.9.1, verl/workers/rollout/base.py."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh, replica_rank: int = 0
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True

    async def update_weights(self, weights: object, wire_format: str = "named_tensors", **kwargs: object) -> None:
        """Map the version to verl's ``global_steps``. The trainer itself has sent the weights to the service."""
        if not isinstance(weights, SentVersion):
            raise TypeError(
                f"weights came as {type(weights).__name__}: the rollout service takes them from its own checkpoint "
                f"engine, set actor_rollout_ref.rollout.checkpoint_engine.backend={NAME}"
            )
        server = ray.get_actor(server_name(self.replica_rank))
        await server.set_global_steps.remote(kwargs.get("global_steps"), weights.version)

    async def resume(self, tags: list[str]) -> NoReturn:
        """Raise NotImplementedError, see ``release``."""
        raise NotImplementedError(f"resume(tags={tags}): {_SEPARATE}")

    async def release(self) -> NoReturn:
        """Raise NotImplementedError: the engines have their own GPUs."""
        raise NotImplementedError(f"release(): {_SEPARATE}")


_SEPARATE = (
    "the rollout service does not give up its memory to a trainer yet: use it with a trainer on GPUs of its own "
    "(separate_async, one_step_off_policy, fully_async), not with the hybrid engine"
)
