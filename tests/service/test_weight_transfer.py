"""Weights as vLLM's own trainers push them: its trainer engine and its HTTP client, with gloo in place of NCCL."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from tests.service.conftest import TOKEN
from tests.support.gloo_trainer import AnnouncesOnce, Tensors, trainer_info, use_gloo
from tests.support.telltale import assert_pure, canary_weights

pytestmark = pytest.mark.client("vLLM's `HTTPVLLMWeightSyncClient`")


class TokenClient(HTTPVLLMWeightSyncClient):
    """vLLM's client has no way to send a token, which the tests' service asks for; all else is its own."""

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout, headers=headers).raise_for_status()


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def vllm_client(service: LocalService) -> HTTPVLLMWeightSyncClient:
    return TokenClient(service.url)


@pytest.fixture
def trainer(
    vllm_client: HTTPVLLMWeightSyncClient, source: Tensors, monkeypatch: pytest.MonkeyPatch
) -> Iterator[nccl_engine.NCCLTrainerWeightTransferEngine]:
    """vLLM's trainer engine, whose group the service has joined."""
    use_gloo(monkeypatch)
    engine = WeightTransferTrainerFactory.trainer_init(trainer_info(), client=vllm_client, source=source)
    yield engine
    vllm_client.shutdown_weight_transfer_engine()
    engine.shutdown()


async def assert_served(client: RolloutClient, version: int) -> None:
    """Every replica serves it, and its tokens carry it."""
    assert {replica.version for replica in (await client.fleet()).replicas} == {version}
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (version,)
    assert_pure(completion)


async def test_vllms_trainer_engine_pushes_versions_that_are_served(service, client, trainer, source, next_version):
    for version in (next_version, next_version + 1):
        source.weights = canary_weights(service.config.model.path, version)
        await asyncio.to_thread(trainer.send_weights)
        await assert_served(client, version)


async def test_a_trainer_of_vllm_033_announces_its_tensors_once(
    service, client, vllm_client, trainer, source, next_version
):
    once = trainer.client = AnnouncesOnce(vllm_client)
    for version in (next_version, next_version + 1, next_version + 2):
        source.weights = canary_weights(service.config.model.path, version)
        await asyncio.to_thread(trainer.send_weights)
        await assert_served(client, version)
    assert [bool(said["names"]) for said in once.announced] == [True, False, False]


async def test_a_trainer_may_name_the_version(service, client, http, vllm_client, trainer, source, next_version):
    named = next_version + 5
    source.weights = canary_weights(service.config.model.path, named)
    finish = vllm_client.finish_weight_update
    vllm_client.finish_weight_update = lambda: finish(str(named))  # its trainer engine names none
    await asyncio.to_thread(trainer.send_weights)
    await assert_served(client, named)
    assert (await http.get("/weight_info")).json() == {"weight_version": str(named)}
    assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": True})).json() == {"success": True}


async def test_a_wrong_tensor_fails_the_update_and_not_the_group(service, client, http, trainer, source, telltale):
    weights = canary_weights(service.config.model.path, telltale + 1)
    source.weights = {"model.extra.weight": weights["model.norm.weight"], **weights}
    with pytest.raises(requests.HTTPError, match="422"):
        await asyncio.to_thread(trainer.send_weights)
    refused = await http.post("/finish_weight_update")
    assert refused.status_code == 422 and "unknown: model.extra.weight" in refused.json()["error"]["message"]
    await assert_served(client, telltale)
    source.weights = weights
    await asyncio.to_thread(trainer.send_weights)
    await assert_served(client, telltale + 1)


async def test_a_trainer_finds_what_it_asks_for_first(http):
    size = await http.request("GET", "/get_world_size", json={})
    assert size.json() == {"world_size": 1} and int(size.headers["content-length"]) == len(size.content)
    config = (await http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["weight_transfer_config"] == {"backend": "gloo"}  # the ingest has no GPU
    checksums = (await http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
    body = {"action": "compare", "baseline": checksums}
    assert (await http.post("/weight_checker", json=body)).json() == {"match": True, "mismatches": []}
