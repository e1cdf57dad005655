"""verl 0.9.1's registries, server client and checkpoint manager around our plugin, against a running service."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_service.client import RolloutClient
from tests.clients.conftest import PROJECT, run_with
from tests.clients.verl_settings import LONG, STEPS
from tests.support.telltale import token_of

REGISTRIES = """
import verl
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
found = [RolloutReplicaRegistry.get("rollout_service"), get_rollout_class("rollout_service"),
         CheckpointEngineRegistry.get("rollout_service")]
print("found", *(each.__name__ for each in found))
"""
REFUSALS = """
import asyncio, sys
import verl
from verl.workers.rollout.replica import RolloutReplicaRegistry
from tests.clients.verl_loop import configuration
replica = RolloutReplicaRegistry.get("rollout_service")

def refusal(make):
    try:
        made = make()
        return "not refused"
    except (NotImplementedError, ValueError) as error:
        return str(error)

def config_with(**changes):
    config = configuration("http://127.0.0.1:1", sys.argv[1]).actor_rollout_ref.rollout
    for name, value in changes.items():
        config[name] = value
    return config

def made(**changes):
    return replica(0, config_with(**changes), None, gpus_per_node=changes.get("n_gpus_per_node", 1))

backend = {"_target_": "verl.workers.config.CheckpointEngineConfig", "backend": "rollout_service"}
print("hybrid:", refusal(lambda: asyncio.run(made().init_hybrid(None))))
print("many:", refusal(lambda: made(n_gpus_per_node=4)))
from rollout_service.client.verl.replica import RolloutServer, generate_arguments
from rollout_service.client.verl.settings import ServiceSettings
from rollout_service.errors import InvalidRequest

def parameters_refused(**given):
    try:
        return f"taken as {generate_arguments(given)}"
    except InvalidRequest as error:
        return error.message

server = RolloutServer(ServiceSettings(url="http://127.0.0.1:1"), 8, 8, None, {"repetition_penalty": 1.3})
try:
    asyncio.run(server.generate([1], {}, "request"))
except InvalidRequest as error:
    print("default:", error.message)
print("neutral:", parameters_refused(temperature=0.5, repetition_penalty=1.0, n=1, seed=None))
print("penalty:", parameters_refused(temperature=0.5, repetition_penalty=1.2))
for name, value in (("enable_rollout_routing_replay", True), ("full_determinism", True),
                    ("logprobs_mode", "raw_logprobs")):
    print(f"{name}:", refusal(lambda: made(**{name: value})))
print("url:", refusal(lambda: made(checkpoint_engine=backend)))
"""

# Importing verl alone takes minutes on a busy machine.
pytestmark = [pytest.mark.client("verl"), pytest.mark.timeout(1800)]
FIXED = {"enable_rollout_routing_replay": True, "full_determinism": True, "logprobs_mode": "raw_logprobs"}
SAID = {"hybrid", "many", "default", "neutral", "penalty", "url", *FIXED}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which this project's entry points stand as an installation writes them."""
    groups = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path_factory.mktemp("installed") / "rollout_service_here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollout-service-here\nVersion: 1.0\n")
    lines = [f"{name} = {module}\n" for name, module in groups["verl.plugins"].items()]
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + "".join(lines))
    return info.parent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(
    service_url: str, model: Path, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What a run of ``verl_loop`` has found."""
    result = tmp_path_factory.mktemp("verl") / "result.json"
    arguments = ["-m", "tests.clients.verl_loop", service_url, str(model), str(result)]
    await run_with("verl", *arguments, path=[installed])
    return dict(json.loads(result.read_text()))


async def test_verl_finds_all_three_by_the_entry_point(installed):
    output = await run_with("verl", "-c", REGISTRIES, path=[installed])
    assert "found RolloutServiceReplica ServerAdapter RolloutServiceCheckpointEngine" in output


async def test_what_does_not_work_is_refused_by_name(installed, model):
    output = await run_with("verl", "-c", REFUSALS, str(model), path=[installed])
    said = dict(line.split(": ", 1) for line in output.splitlines() if line.split(":")[0] in SAID)
    assert "use it with a trainer that has standalone rollouts" in said["hybrid"]
    assert "verl would make 4 replicas" in said["many"]
    assert said["neutral"] == "taken as {'temperature': 0.5}"
    assert said["default"].endswith("does not take from verl: {'repetition_penalty': 1.3}")  # rollout's own setting
    assert said["penalty"].endswith("does not take from verl: {'repetition_penalty': 1.2}")
    assert "engine_kwargs.rollout_service.url=http://HOST:PORT" in said["url"]
    for name, value in FIXED.items():
        assert f"does not implement { ({f'rollout.{name}': value}) }: leave verl's default" in said[name]


async def test_each_update_of_verl_is_a_version(found, service_url):
    versions = [int(metrics["rollout_service/version"]) for metrics in found["metrics"]]
    assert versions == list(range(versions[0], versions[0] + len(STEPS)))
    async with RolloutClient(service_url) as client:
        assert (await client.fleet()).latest_version == versions[-1]
        assert not await client.is_paused()


def test_rollouts_are_labelled_with_verl_s_steps(found):
    for update, (output, step) in enumerate(zip(found["short"], STEPS, strict=False), start=1):
        assert output["token_ids"] == [token_of(update)] * 8
        assert len(output["log_probs"]) == 8
        assert output["stop_reason"] == "length"  # FullyAsyncLLMServerClient's word for a full budget
        fields = output["extra_fields"]
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (step, step)


def test_a_rollout_across_an_update_goes_on_with_new_weights(found):
    """What verl aborts before it sends weights, its client asks for again; both parts are labelled."""
    old, new = token_of(2), token_of(3)
    for output in found["long"]:
        tokens = output["token_ids"]
        before = tokens.count(old)
        assert tokens == [old] * before + [new] * (LONG - before)
        assert len(output["log_probs"]) == LONG
        fields = output["extra_fields"]
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (STEPS[1], STEPS[2])
    assert any(0 < output["token_ids"].count(old) < LONG for output in found["long"])
