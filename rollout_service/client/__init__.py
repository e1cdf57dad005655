"""The trainer's side of the service. Importing this pulls in neither torch, vllm nor ray.

    async with RolloutClient("http://127.0.0.1:8000") as client:
        pushed = await client.push_weights("next", model.state_dict())
        rollouts = await client.generate_batch(prompts, n=8, max_tokens=64, min_weight_version=pushed.version)

``SyncRolloutClient`` is the same for code without an event loop of its own, and for notebooks.
"""

from rollout_service.client._client import RolloutClient
from rollout_service.client._partial import BatchFailed, PartialBatch, PartialRollout
from rollout_service.client._stream import RolloutStream, StreamPiece
from rollout_service.client._sync import SyncRolloutClient

__all__ = [
    "BatchFailed",
    "PartialBatch",
    "PartialRollout",
    "RolloutClient",
    "RolloutStream",
    "StreamPiece",
    "SyncRolloutClient",
]
