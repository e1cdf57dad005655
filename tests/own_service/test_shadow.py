"""A shadow engine tells FP8 noise from an update that broke the weights."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from benchmarks.mismatch.broken_version import commit_broken
from rollout_service.client import RolloutClient
from rollout_service.protocol.mismatch import MismatchRow
from rollout_service.protocol.rollout import Rollout
from tests.support.own_service import own_service

pytestmark = pytest.mark.slow
GOOD_VERSIONS = 3
TOKENS = 48
PROMPTS = [[5 + i, 6, 7, 9 + i] for i in range(40)]


async def rolled_out(client: RolloutClient, version: int) -> list[Rollout]:
    return await client.generate_batch(PROMPTS, max_tokens=TOKENS, ignore_eos=True, min_weight_version=version)


async def shadow_is_up(client: RolloutClient) -> None:
    """The service answers before the shadow has its engine, and what is rolled out before then is never scored."""
    while not any(row.source == "shadow" for row in (await client.mismatch(0)).rows):
        await client.generate_batch(PROMPTS[:4], max_tokens=TOKENS, ignore_eos=True)
        await asyncio.sleep(0.5)


async def scored(client: RolloutClient, version: int) -> MismatchRow:
    """The shadow's row once it is judged; that it never is is what the test's time limit is for."""
    while True:
        for row in (await client.mismatch(version)).rows:
            if row.source == "shadow" and row.tokens >= 500:
                return row
        await asyncio.sleep(0.2)


def trained(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """As after some optimizer steps: every matrix moved by about a percent."""
    generator = torch.Generator().manual_seed(step)
    noise = {n: torch.randn(t.shape, generator=generator) for n, t in weights.items()}
    return {
        n: (t.float() + 0.01 * noise[n] * t.float().std()).bfloat16() for n, t in weights.items() if t.ndim == 2
    } | {n: t for n, t in weights.items() if t.ndim < 2}


async def suspects_on_metrics(url: str) -> set[tuple[str, str]]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.labels["version"], sample.labels["replica"])
        for sample in samples
        if sample.name == "rollout_version_suspect" and sample.value == 1
    }


async def test_only_a_version_with_a_layers_scales_doubled_is_suspect(tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {
        "model": {"path": str(tmp_path / "tiny-qwen3")},
        "weights": {"root": str(tmp_path / "weights"), "poll_s": 1.0},
        "monitor": {"min_tokens": 500, "suspect_prob_error": 1.1},
        "shadow": {"share": 0.5},
        "scaling": {"gateways": 2},  # either sends what it samples
    }
    async with own_service(overrides) as (url, _), RolloutClient(url) as client:
        weights = load_file(tmp_path / "tiny-qwen3/model.safetensors")
        await shadow_is_up(client)
        [replica] = [replica.replica_id for replica in (await client.fleet()).replicas]
        for version in range(1, GOOD_VERSIONS + 1):
            await client.push_weights(version, trained(weights, version))
            await rolled_out(client, version)
            row = await scored(client, version)
            assert (row.replica_id, row.suspect_since) == (replica, None), row
            assert 0 < row.k3 < 0.01 and 1 < row.prob_error < 1.1, row
        assert await suspects_on_metrics(url) == set()

        broken = GOOD_VERSIONS + 1
        commit_broken(tmp_path / "weights", broken, layer=1)
        await rolled_out(client, broken)
        row = await scored(client, broken)
        status = await client.weights(broken)
        assert status.state == "live" and status.suspect is not None
        [suspicion] = status.suspect
        assert (suspicion.replica_id, suspicion.source, suspicion.since) == (replica, "shadow", row.suspect_since)
        assert await suspects_on_metrics(url) == {(str(broken), replica)}
        # the shadow is no replica
        assert [each.replica_id for each in (await client.fleet()).replicas] == [replica]
        assert [each.replica_id for each in status.replicas] == [replica]
