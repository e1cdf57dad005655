"""Register the rollout, its server adapter and its checkpoint engine with verl as ``rollout_service``.

verl loads this module at the end of ``import verl``, in every process. It logs an error only at level DEBUG.
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
# verl 0.9.1 has no public function for this registry
_ROLLOUT_REGISTRY[NAME, "async"] = "rollout_service.client.verl.server_adapter.ServerAdapter"
