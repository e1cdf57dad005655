"""Tensors that the model's class leaves out, from trainers on every transport: the version is the one without them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_service.client import RolloutClient
from rollout_service.errors import InvalidManifest
from tests.support.gloo_trainer import GlooTrainer
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.ingest.broadcasting import join, push
from tests.unit.ingest.trainer import Weights

IGNORED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
    "model.rotary_emb.cos_cached": torch.ones(3, 5, dtype=torch.float16),
}
UNTAKEN = {**IGNORED, "model.rotary_emb.inv_freq": torch.arange(4)}
"""With one of a dtype that weights never have."""

NORM = "model.norm.weight"


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[RealIngest]:
    weights, scaling = {"source_roots": [str(tmp_path)]}, {"min_replicas": 0}  # a commit waits for no replica
    async with real_ingest(model, tmp_path / "log", weights=weights, scaling=scaling) as running:
        yield running


async def plain_digest(client: RolloutClient, weights: Weights) -> str | None:
    return (await client.push_weights("next", dict(weights), transport="http", wait="none")).digest


@pytest.mark.parametrize(("transport", "quantize"), [("http", "trainer"), ("shared_memory", "service")])
async def test_ignored_tensors_of_a_push_are_left_out(client, weights, transport, quantize):
    sent = {**IGNORED, **weights}
    status = await client.push_weights(1, sent, transport=transport, quantize=quantize, wait="none")
    assert status.digest == await plain_digest(client, weights)


async def test_ignored_tensors_of_a_delta_are_left_out(client, weights):
    norm = weights[NORM].clone()
    norm[3] += 1
    new = {**weights, NORM: norm}
    await client.push_weights(1, {**weights, **IGNORED}, transport="delta", wait="none")
    status = await client.push_weights(2, {**new, **IGNORED}, transport="delta", wait="none")
    assert status.delta_of == 1
    assert status.digest == await plain_digest(client, new)


async def test_ignored_tensors_of_a_folder_may_have_any_dtype(client, weights, tmp_path):
    folder = tmp_path / "step"
    folder.mkdir()
    save_file({**weights, **UNTAKEN}, folder / "model.safetensors")
    status = await client.push_path(1, folder, wait="none")
    assert status.digest == await plain_digest(client, weights)


async def test_ignored_tensors_of_a_broadcast_are_left_out(service, client, weights):
    trainer = GlooTrainer()
    await join(service.ingest, trainer)
    status = await push(service.ingest, trainer, {**IGNORED, **weights})
    trainer.close()
    assert status.digest == await plain_digest(client, weights)


async def test_an_unknown_tensor_beside_ignored_ones_is_refused(client, weights):
    with pytest.raises(InvalidManifest, match=r"1 unknown: model\.stranger\.weight;"):
        await client.push_weights(1, {**weights, **IGNORED, "model.stranger.weight": torch.ones(1)})
