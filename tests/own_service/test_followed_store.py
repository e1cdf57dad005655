"""A service that follows what another one, in a cluster of its own, publishes."""

import asyncio

from rollout_service.client import RolloutClient
from rollout_service.model.tiny import make_tiny_qwen3
from rollout_service.protocol.weights import WeightStatus
from tests.support.own_service import own_service
from tests.support.telltale import assert_pure, canary_weights


async def live(client: RolloutClient, version: int) -> WeightStatus:
    """Return the status of a version once every replica serves it."""
    while True:
        for status in await client.weights():
            if (status.version, status.state) == (version, "live"):
                return status
        await asyncio.sleep(0.2)


async def test_a_second_cluster_serves_the_same_versions(tmp_path):
    model, store = tmp_path / "tiny-qwen3", tmp_path / "store"
    make_tiny_qwen3(model)
    store.mkdir()

    def overrides(root: str, **weights: object) -> dict[str, dict[str, object]]:
        log = {"root": str(tmp_path / root), "poll_s": 1.0, "dead_after_s": 5.0}
        return {"model": {"path": str(model)}, "weights": {**log, **weights}}

    async with (
        own_service(overrides("leader", publish=str(store))) as (url, _),
        own_service(overrides("follower", watch=str(store), source_roots=[str(store)])) as (other, _),
        RolloutClient(url) as leader,
        RolloutClient(other) as follower,
    ):
        for version in range(1, 4):
            pushed = await leader.push_weights(version, canary_weights(model, version))
            assert (await live(follower, version)).digest == pushed.digest
            completion = (await follower.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
            assert completion.versions == (version,)
            assert_pure(completion)
