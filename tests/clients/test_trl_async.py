"""TRL 1.16.0's AsyncGRPOTrainer, its rollout worker and our weight transfer, in a whole training on the CPU."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from rollout_service.protocol.rollout import Rollout
from tests.clients.conftest import run_with
from tests.support.recording_proxy import Exchange, recording_proxy

pytestmark = [pytest.mark.client("TRL, async"), pytest.mark.timeout(1800)]  # importing TRL, twice, and a training
STEPS = 3
PROMPT = [8, 9, 10, 11, 12]
SIGNATURES = """
import inspect
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol as theirs
from rollout_service.client.trl import RolloutServiceWeightTransfer as ours
named = [name for name, member in vars(theirs).items() if inspect.isfunction(member) and not name.startswith("_")]
for name in named:
    print(name, [list(inspect.signature(getattr(each, name)).parameters) for each in (theirs, ours)])
"""


@dataclass(frozen=True)
class Training:
    """What a run of the example left behind."""

    versions: list[int]
    """After each sync: one before the first step and one after each."""
    rewards: list[float]
    exchanges: list[Exchange]
    """Of the rollout worker with the service."""
    commits: list[Exchange]
    trained: Path
    """Folder of the model at its end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def training(service_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    out = tmp_path_factory.mktemp("trl")
    async with recording_proxy(service_url, r"/v1/completions|/v1/weights/\d+/commit") as proxy:
        arguments = ["--url", proxy.url, "--model", str(model), "--steps", str(STEPS), "--out", str(out)]
        await run_with("trl", "-m", "examples.trl_async_grpo", *arguments)
    summary = json.loads((out / "summary.json").read_text())
    generations = [exchange for exchange in proxy.exchanges if exchange.path == "/v1/completions"]
    commits = [exchange for exchange in proxy.exchanges if exchange.path != "/v1/completions"]
    return Training(summary["versions"], summary["rewards"], generations, commits, out / "trained")


async def test_the_transfer_has_every_method_of_the_protocol():
    output = await run_with("trl", "-c", SIGNATURES)
    found = dict(line.split(" ", 1) for line in output.splitlines() if "[[" in line)
    both = {name: json.loads(parameters.replace("'", '"')) for name, parameters in found.items()}
    assert both.keys() == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    assert {name for name, (theirs, ours) in both.items() if theirs != ours} == set()


async def test_a_sync_before_and_after_every_step(training, client):
    first = training.versions[0]
    assert training.versions == list(range(first, first + STEPS + 1))
    assert len(training.rewards) == STEPS
    fleet = await client.fleet()
    assert fleet.latest_version == training.versions[-1]
    assert not await client.is_paused()


def test_what_trl_asks_for_is_answered(training, model):
    assert {exchange.status for exchange in training.exchanges} == {200}
    body = training.exchanges[0].body
    assert (body["model"], body["logprobs"], body["return_token_ids"]) == (str(model), 0, True)
    assert max(exchange.body["seed"] for exchange in training.exchanges) > 2**60
    assert all("authorization" not in exchange.headers for exchange in training.exchanges)
    for exchange in training.exchanges:
        (choice,) = exchange.reply["choices"]
        assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


def test_rollouts_carry_the_versions_that_were_pushed(training):
    """Version 0, which the trainer never had, samples nothing; every version but perhaps the last samples something."""
    sampled = {version for exchange in training.exchanges for version in versions_of(exchange.reply)}
    assert set(training.versions[:-1]) <= sampled <= set(training.versions)


def test_after_a_sync_nothing_older_is_sampled(training):
    """What TRL asks for after ``resume`` is of the version that it has just sent, on every replica."""
    for exchange in training.exchanges:
        synced = [commit.reply["version"] for commit in training.commits if commit.ended < exchange.began]
        assert synced, "TRL samples nothing before its first sync"
        assert min(versions_of(exchange.reply)) >= max(synced)


async def test_the_service_samples_from_the_trained_weights(training, client, model):
    """Logprobs of the newest version are those of the model that TRL saved, within FP8; not those it began with."""
    rollout = await client.generate(
        PROMPT, n=8, max_tokens=24, ignore_eos=True, min_weight_version=training.versions[-1]
    )
    assert difference(training.trained, rollout) < 0.05
    assert difference(model, rollout) > 2 * difference(training.trained, rollout)


def versions_of(reply: dict[str, Any]) -> list[int]:
    """Versions that made a completion, in order."""
    return [int(span["version"]) for span in reply["choices"][0]["weight_versions"]]


def difference(folder: Path, rollout: Rollout) -> float:
    """Mean absolute difference of the model's logprobs and those that the service returned, over all tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = []
    for completion in rollout.completions:
        tokens = torch.tensor([*rollout.prompt_token_ids, *completion.token_ids])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        made = torch.arange(len(rollout.prompt_token_ids), len(tokens))
        differences.append((logprobs[made - 1, tokens[made]] - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(differences).mean())
