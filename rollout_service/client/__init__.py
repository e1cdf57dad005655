"""Client library for trainers. Importing it loads neither torch, vllm nor ray.

    async with RolloutClient("http://127.0.0.1:8000") as client:
        pushed = await client.push_weights("next", model.state_dict())
        rollouts = await client.generate_batch(prompts, n=8, max_tokens=64, min_weight_version=pushed.version)

``SyncRolloutClient`` has the same methods without ``await``, for notebooks and code without an event loop.
"""

from rollout_service.client._batch import BatchFailed, PartialBatch
from rollout_service.client._client import RolloutClient
from rollout_service.client._generate import Scores
from rollout_service.client._stream import PartialRollout, RolloutStream, StreamPiece
from rollout_service.client._sync import SyncRolloutClient

__all__ = [
    "BatchFailed",
    "PartialBatch",
    "PartialRollout",
    "RolloutClient",
    "RolloutStream",
    "Scores",
    "StreamPiece",
    "SyncRolloutClient",
]
