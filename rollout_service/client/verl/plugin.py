"""What verl imports: registers the rollout, its server adapter and its checkpoint engine as ``rollout_service``.

verl loads it at the end of ``import verl``, in every process, and only logs an error at level DEBUG.
"""

from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from rollout_service.client.verl.checkpoint_engine import RolloutServiceCheckpointEngine
from rollout_service.client.verl.settings import NAME


def _load_replica() -> type[RolloutReplica]:
    from rollout_service.client.verl.replica import RolloutServiceReplica

    return RolloutServiceReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
CheckpointEngineRegistry.register(NAME)(RolloutServiceCheckpointEngine)
# verl 0.9.1 has no function for this one
_ROLLOUT_REGISTRY[NAME, "async"] = "rollout_service.client.verl.server_adapter.ServerAdapter"
