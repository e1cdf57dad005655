"""SkyRL 0.4's own weight-sync client pushes weights: under vLLM's trainer engine, with gloo in place of NCCL."""

import asyncio
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_engine

from tests.clients.lines import ClientProcess
from tests.support.gloo_trainer import AnnouncesOnce, Tensors, trainer_info, use_gloo
from tests.support.telltale import assert_pure, canary_weights

pytestmark = pytest.mark.client("SkyRL")


class WeightClient:
    """SkyRL's client, as vLLM's trainer engine calls it: from a thread, blocking it."""

    def __init__(self, skyrl: ClientProcess) -> None:
        self.init_weight_transfer_engine = skyrl.in_thread("weights.init_weight_transfer_engine")
        self.start_weight_update = skyrl.in_thread("weights.start_weight_update")
        self.update_weights = skyrl.in_thread("weights.update_weights")
        self.finish_weight_update = skyrl.in_thread("weights.finish_weight_update")


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture(params=["0.32", "0.33"])
async def trainer(
    skyrl: ClientProcess, source: Tensors, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    """vLLM's engine, which SkyRL's subclasses without a change to what it sends."""
    use_gloo(monkeypatch)
    begin = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init
    client: Any = WeightClient(skyrl)
    if request.param == "0.33":
        client = AnnouncesOnce(client)
    return await asyncio.to_thread(begin, trainer_info(), client=client, source=source)


async def test_skyrls_client_pushes_versions_that_are_served(model, client, skyrl, trainer, source, next_version):
    for version in (next_version, next_version + 1):
        source.weights = canary_weights(model, version)
        await skyrl.call("weights.pause_generation")
        await asyncio.to_thread(trainer.send_weights)
        await skyrl.call("weights.reset_prefix_cache")
        await skyrl.call("weights.resume_generation")
        completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
        assert completion.versions == (version,)
        assert_pure(completion)


async def test_skyrls_client_tells_what_was_refused(model, client, skyrl, trainer, source, next_version):
    source.weights = {"model.extra.weight": torch.zeros(2), **canary_weights(model, next_version)}
    with pytest.raises(RuntimeError, match=r"failed \[422\]: .*unknown: model\.extra\.weight"):
        await asyncio.to_thread(trainer.send_weights)
    with pytest.raises(RuntimeError, match="engines here have no draft model"):
        await skyrl.call("weights.start_draft_weight_update")
