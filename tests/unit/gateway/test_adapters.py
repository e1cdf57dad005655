"""Adapters in requests: their names in either field, and what the gateway knows of them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout_service.errors import InvalidRequest, NotFound, NotReady
from rollout_service.gateway import dependencies
from rollout_service.gateway.completions import CompletionRequest, completions
from rollout_service.gateway.dependencies import KnownAdapters, Services
from rollout_service.gateway.generate import generate
from rollout_service.gateway.models import models
from rollout_service.gateway.sglang.generate import SglangGenerate
from rollout_service.gateway.sglang.generate import generate as sglang_generate
from rollout_service.protocol.adapters import AdapterStatus, CommitAdapter, WantedAdapter
from rollout_service.protocol.base import NEXT
from rollout_service.protocol.generate import GenerateRequest
from tests.unit.gateway.chats import HELLO
from tests.unit.gateway.fakes import http_to


class Ingest:
    """Has committed versions."""

    def __init__(self, *committed: tuple[str, int]) -> None:
        self.committed, self.is_away = list(committed), False
        self.is_silent, self.asked = False, 0

    async def commit_adapter(self, name: str, commit: CommitAdapter) -> None:
        assert commit.wait == "all"
        newest = max((version for known, version in self.committed if known == name), default=0)
        self.committed.append((name, newest + 1 if commit.version == NEXT else int(commit.version)))

    async def remove_adapter(self, name: str) -> None:
        self.committed = [each for each in self.committed if each[0] != name]

    async def adapters(self) -> list[AdapterStatus]:
        self.asked += 1
        if self.is_silent:
            await asyncio.Event().wait()
        if self.is_away:
            raise NotReady("the ingest is being replaced")
        fixed: dict[str, Any] = {"digest": "d", "base_version": 0, "base_digest": "b", "rank": 4, "nbytes": 1}
        return [AdapterStatus(name=name, version=version, **fixed) for name, version in self.committed]


@pytest.fixture
def ingest() -> Ingest:
    return Ingest(("a", 1), ("a", 3), ("b", 7))


@pytest.fixture
def adapted(services: Services, ingest: Ingest) -> Services:
    return replace(services, adapters=KnownAdapters(ingest))


async def test_art_names_each_step_of_an_adapter(adapted, ingest, engine):
    """OpenPipe's ART 0.5.23 with ``vllm_runtime.mode: external`` (``art/megatron/distributed_service.py``)."""
    async with http_to(replace(adapted, ingest=ingest)) as http:
        assert (await http.get("/art/capabilities")).status_code == 404
        for step in (0, 1):
            body = {"lora_name": f"art-model@{step}", "lora_path": "/checkpoints/0000"}
            assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
            asked = {"model": f"art-model@{step}", "prompt": [5, 6]}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200
        for step, status, left in ((9, 404, [0, 1]), (0, 200, [0, 1]), (1, 200, []), (0, 404, [])):
            reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": f"art-model@{step}"})
            assert reply.status_code == status, reply.text
            assert [version for name, version in ingest.committed if name == "art-model"] == left
    assert [call.adapter.exact_version for call in engine.calls] == [0, 1]


async def test_skyrl_loads_each_step_under_one_name(adapted, ingest):
    """SkyRL 0.4.0: ``RemoteInferenceClient.load_lora_adapter``, in memory or from a folder."""
    async with http_to(replace(adapted, ingest=ingest)) as http:
        for version in (4, 5):
            body = {"lora_name": "a", "lora_path": "/shared/lora"}
            assert (await http.post("/skyrl/v1/load_lora_adapter", json=body)).status_code == 200
            assert ingest.committed[-1] == ("a", version)
        refused = await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a", "in_memory": True})
        assert refused.status_code == 422 and "in_memory is not a field here, or not implemented" in refused.text


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"model": "a"}, WantedAdapter(name="a")),
        ({"model": "a@3"}, WantedAdapter(name="a", exact_version=3)),
        ({"adapter": "b", "model": "tiny"}, WantedAdapter(name="b")),
        ({"adapter": "a", "min_adapter_version": 4}, WantedAdapter(name="a", min_version=4)),
        ({"adapter": "a@9"}, WantedAdapter(name="a", exact_version=9)),  # may be committed any moment
        ({"model": "tiny"}, None),
    ],
)
async def test_a_request_names_its_adapter_in_either_field(adapted, engine, asked, wanted):
    reply = await generate(GenerateRequest(token_ids=(5, 6), **asked), adapted)
    assert engine.calls[-1].adapter == wanted
    assert reply["model"] == asked.get("model", "tiny")
    await completions(CompletionRequest(prompt=(5, 6), **asked), adapted)
    assert engine.calls[-1].adapter == wanted
    if set(asked) == {"adapter"}:
        assert await sglang_generate(SglangGenerate(input_ids=(5, 6), lora_path=asked["adapter"]), adapted)
        assert engine.calls[-1].adapter == wanted


@pytest.mark.parametrize("name", ["c", "a@2", "a@", "../a", "b@1"])
async def test_an_unknown_adapter_is_not_found(adapted, services, name):
    for known, why in ((adapted, "there is no adapter"), (services, r"there is no adapter .*; there are \[\]")):
        with pytest.raises(NotFound, match=why):
            await generate(GenerateRequest(token_ids=(5, 6), adapter=name), known)
        with pytest.raises(NotFound, match="there is no adapter"):
            await sglang_generate(SglangGenerate(input_ids=(5, 6), lora_path=name), known)
        with pytest.raises(NotFound, match="is not served here"):
            await generate(GenerateRequest(token_ids=(5, 6), model=name), known)


async def test_two_adapters_in_one_request_are_refused(adapted):
    with pytest.raises(InvalidRequest, match="are two adapters"):
        await generate(GenerateRequest(token_ids=(5, 6), model="a", adapter="b"), adapted)
    with pytest.raises(ValueError, match="min_adapter_version needs an adapter"):
        GenerateRequest(token_ids=(5, 6), adapter="a@1", min_adapter_version=1)


async def test_known_adapters_outlive_the_ingest(adapted, ingest, engine):
    assert [card["id"] for card in (await models(adapted))["data"]] == ["tiny", "a", "b"]
    ingest.is_away = True
    await generate(GenerateRequest(token_ids=(5, 6), adapter="a"), adapted)
    assert engine.calls[-1].adapter == WantedAdapter(name="a")


async def test_requests_wait_once_for_an_ingest_that_never_answers(adapted, ingest, engine, monkeypatch):
    monkeypatch.setattr(dependencies, "INGEST_ANSWERS_S", 0.01)
    monkeypatch.setattr(KnownAdapters, "MAX_AGE_S", 0.0)
    await generate(GenerateRequest(token_ids=(5, 6), adapter="a"), adapted)
    ingest.is_silent, ingest.asked = True, 0
    request = GenerateRequest(token_ids=(5, 6), adapter="a")
    *_, listed = await asyncio.gather(*[generate(request, adapted) for _ in range(3)], models(adapted))
    assert len(engine.calls) == 4 and [card["id"] for card in listed["data"]] == ["tiny", "a", "b"]
    assert ingest.asked == 1
    with pytest.raises(NotReady, match=r"adapter 'c' is not known here: the ingest has not answered .*: send it again"):
        await generate(GenerateRequest(token_ids=(5, 6), adapter="c"), adapted)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ],
)
async def test_every_route_of_vllms_takes_an_adapter_as_its_model(chatting, ingest, path, body):
    async with http_to(replace(chatting, adapters=KnownAdapters(ingest))) as http:
        for name, status in (("a", 200), ("a@3", 200), ("c", 404)):
            reply = await http.post(path, json={"model": name, **body})
            assert reply.status_code == status, reply.text
    async with http_to(chatting) as http:  # without adapters
        reply = await http.post(path, json={"model": 1000 * "c", **body})
        assert (reply.status_code, len(reply.text) < 1000) == (404, True), reply.text
