"""TRL 1.16.0's AsyncGRPOTrainer trains a LoRA adapter through two replicas, by vLLM's routes for adapters."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from examples.trl_async_grpo import ADAPTERS
from rollout_service.client import RolloutClient
from rollout_service.protocol.fleet import Fleet
from tests.clients.conftest import run_with
from tests.clients.test_trl_async import difference
from tests.support.own_service import own_service
from tests.support.recording_proxy import Exchange, recording_proxy

pytestmark = [
    pytest.mark.client("TRL, async"),
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]
STEPS = 3
PROMPT = [8, 9, 10, 11, 12]


@dataclass(frozen=True)
class Training:
    """What a run of the example left behind, and the service that it used."""

    model: Path
    """The model that the adapter changes."""
    trained: Path
    """The same, with the trained adapter merged into it."""
    versions: list[int]
    generations: list[Exchange]
    loads: list[Exchange]
    before: Fleet
    client: RolloutClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def training(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Training]:
    folder = tmp_path_factory.mktemp("trl-lora")
    model, out = folder / "tiny-qwen3", folder / "out"
    overrides = {
        "model": {"path": str(model), "aliases": [str(model)]},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "weights": {"root": str(folder / "weights"), "poll_s": 1.0, "source_roots": [str(out)]},
        "engine": {"adapters": ADAPTERS},
    }
    async with (
        own_service(overrides) as (url, _),
        recording_proxy(url, r"/v1/completions|/v1/(un)?load_lora_adapter") as proxy,
        RolloutClient(url) as client,
    ):
        before = await client.fleet()
        arguments = ["--url", proxy.url, "--model", str(model), "--steps", str(STEPS), "--out", str(out), "--lora"]
        await run_with("trl", "-m", "examples.trl_async_grpo", *arguments)
        versions = json.loads((out / "summary.json").read_text())["versions"]
        generations = [exchange for exchange in proxy.exchanges if exchange.path == "/v1/completions"]
        loads = [exchange for exchange in proxy.exchanges if exchange.path == "/v1/load_lora_adapter"]
        yield Training(model, out / "trained", versions, generations, loads, before, client)


async def test_adapters_are_sent_instead_of_weights(training):
    assert [exchange.body["lora_name"] for exchange in training.loads] == names(training)
    assert {exchange.status for exchange in training.loads} == {200}
    fleet = await training.client.fleet()
    assert fleet.latest_version == training.before.latest_version
    assert {replica.update for replica in fleet.replicas} == {replica.update for replica in training.before.replicas}
    live = await training.client.adapters()
    assert all(len(adapter.replicas) == 2 for adapter in live) and live[-1].name == names(training)[-1]


async def test_rollouts_are_of_the_adapters_that_they_name(training):
    replicas, sampled = set[str](), set[str]()
    for exchange in training.generations:
        assert exchange.status == 200, exchange.reply
        [choice] = exchange.reply["choices"]
        for span in choice["weight_versions"]:
            assert span["adapter"] == exchange.body["model"]
            replicas.add(span["replica_id"])
            sampled.add(span["adapter"])
    assert set(names(training)[:-1]) <= sampled <= set(names(training))
    assert len(replicas) == 2


async def test_the_service_samples_from_the_trained_adapter(training):
    """Logprobs are those of the base with the trained adapter merged, within FP8; not those of the base."""
    rollout = await training.client.generate(PROMPT, n=8, max_tokens=24, ignore_eos=True, adapter=names(training)[-1])
    assert difference(training.trained, rollout) < 0.05
    assert difference(training.model, rollout) > 2 * difference(training.trained, rollout)


def names(training: Training) -> list[str]:
    """Return TRL's names of the adapter's versions."""
    return [f"trl-policy-v{version}" for version in training.versions]
