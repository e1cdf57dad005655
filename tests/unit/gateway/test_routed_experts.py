"""Requests for routed experts, up to the engine and back."""

import base64
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import GenerateCall
from tests.unit.gateway.fakes import EchoEngine, client_of, http_to, with_engine


@dataclass
class RoutingEngine(EchoEngine):
    """Says of token i that it went to the experts i and i + 1, if it is asked."""

    told: RoutedExperts | None = None
    """Said instead."""

    async def generate(self, call: GenerateCall) -> Rollout:
        rollout, start = await super().generate(call), call.sampling.routed_experts_prompt_start
        if start is None:
            return rollout
        tokens = range(start, len(call.prompt_token_ids) + len(rollout.completions[0].token_ids) - 1)
        told = self.told or RoutedExperts.of(
            np.array([[[i, i + 1]] for i in tokens], np.uint8).reshape(-1, 1, 2), start
        )
        each = [c.model_copy(update={"routed_experts": told}) for c in rollout.completions]
        return rollout.model_copy(update={"completions": tuple(each)})


@pytest.fixture
def routing(services: Services) -> Services:
    return replace(with_engine(services, RoutingEngine()), returns_experts=True)


@pytest.mark.parametrize(
    ("fields", "sampling", "start"),
    [
        ({"return_routed_experts": True}, {}, 0),
        ({"return_routed_experts": True}, {"routed_experts_prompt_start": 2}, 2),
        ({}, {"routed_experts_prompt_start": 1}, 1),  # as prime-rl's renderers ask
    ],
    ids=str,
)
async def test_they_come_with_each_choice_of_both_routes(routing, fields, sampling, start):
    async with http_to(routing) as http:
        replies = [
            await http.post(
                "/inference/v1/generate",
                json={"token_ids": [5, 6, 7], "sampling_params": {"n": 2, **sampling}, **fields},
            ),
            await http.post("/v1/completions", json={"prompt": [5, 6, 7], "n": 2, **sampling, **fields}),
        ]
    for reply in replies:
        assert reply.status_code == 200 and b'"routed_experts":{"data":"' in reply.content
        for choice in reply.json()["choices"]:
            told = RoutedExperts.model_validate(choice["routed_experts"])
            assert told.start == start and told.rows()[0].tolist() == [[start, start + 1]]


async def test_skyrl_s_route_returns_them_unasked(routing):
    """SkyRL 0.4.0 with routing replay: ``inference_servers/remote_inference_client.py``."""
    body = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"logprobs": 1, "max_tokens": 8}}
    async with http_to(routing) as http:
        reply = await http.post("/skyrl/v1/generate", json=body, headers={"X-Session-ID": "1"})
        assert b'"routed_experts":{"data":"' in reply.content  # the client cuts it out of the bytes
        [choice] = reply.json()["choices"]
        assert RoutedExperts.model_validate(choice["routed_experts"]).shape == (5, 1, 2)
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 3
        supported = await http.post("/skyrl/v1/generate", json={**body, "return_sample_support": True})
        assert supported.status_code == 422 and "return_sample_support is not a field here" in supported.text
    async with http_to(replace(routing, returns_experts=False)) as http:
        refused = await http.post("/skyrl/v1/generate", json=body)
        assert refused.status_code == 422 and "engine.return_routed_experts" in refused.text


@pytest.mark.parametrize("scores", [False, True])
async def test_sglang_s_route_returns_them_as_int32(routing, scores):
    """As slime 624b824 and AReaL 1.0.4 read them: the rows of all tokens but the last."""
    body = {"input_ids": [5, 6, 7], "return_routed_experts": True}
    if scores:
        body |= {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    async with http_to(routing) as http:
        meta = (await http.post("/generate", json=body)).json()["meta_info"]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        tokens = meta["prompt_tokens"] + meta["completion_tokens"] - 1
        assert rows.reshape(tokens, 1, 2).tolist() == [[[i, i + 1]] for i in range(tokens)]
        assert tokens == (2 if scores else 5)
        plain = (await http.post("/generate", json={"input_ids": [5], "return_routed_experts": False})).json()
        assert "routed_experts" not in plain["meta_info"]


async def test_clients_that_know_no_gaps_get_no_unknown_rows(routing):
    """SkyRL, slime and AReaL would replay their zeros."""
    gap = RoutedExperts.of(np.zeros((5, 1, 2), np.uint8), 0, ((2, 3),))
    engine = RoutingEngine(told=gap)
    async with http_to(with_engine(routing, engine)) as http:
        body = {"token_ids": [5, 6, 7], "sampling_params": {}}
        reply = await http.post("/skyrl/v1/generate", json=body)
        assert reply.status_code == 503 and "send the request again" in reply.json()["error"]["message"]
        reply = await http.post("/generate", json={"input_ids": [5, 6, 7], "return_routed_experts": True})
        assert reply.status_code == 503 and "send the request again" in reply.json()["error"]["message"]
        reply = await http.post("/inference/v1/generate", json={**body, "return_routed_experts": True})
        assert reply.json()["choices"][0]["routed_experts"]["missing"] == [[2, 3]]


@pytest.mark.parametrize(("expert", "dtype"), [(300, "int16"), (3, "uint8")])
async def test_skyrl_s_route_returns_the_smallest_type(routing, expert, dtype):
    """SkyRL's client refuses uint16, which this service's other routes return from 257 experts on."""
    engine = RoutingEngine(told=RoutedExperts.of(np.full((5, 1, 2), expert, np.uint16), 0))
    async with http_to(with_engine(routing, engine)) as http:
        reply = await http.post("/skyrl/v1/generate", json={"token_ids": [5, 6, 7]})
    assert b'"routed_experts":{"data":"' in reply.content
    packed = reply.json()["choices"][0]["routed_experts"]
    assert packed["dtype"] == dtype and packed["shape"] == [5, 1, 2]
    assert np.frombuffer(base64.b64decode(packed["data"]), dtype).tolist() == [expert] * 10


async def test_the_client_gives_them_by_token(routing):
    async with client_of(routing) as client:
        rollout = await client.generate([5, 6, 7], return_routed_experts=True, routed_experts_prompt_start=1)
        experts, known = rollout.routed_experts()
        tokens = 3 + len(rollout.completions[0].token_ids)
        assert experts.shape == (tokens, 1, 2)
        assert known.tolist() == [False, *[True] * (tokens - 2), False]
        assert experts[known][:, 0, 0].tolist() == list(range(1, tokens - 1))
        with pytest.raises(ValueError, match="return_routed_experts=True"):
            (await client.generate([5, 6, 7])).routed_experts()


@pytest.mark.parametrize("asked", [{"return_routed_experts": True}, {"routed_experts_prompt_start": 0}], ids=str)
async def test_a_stream_of_routed_experts_is_refused(routing, asked):
    async with client_of(routing) as client:
        with pytest.raises(InvalidRequest, match=r"not in a stream: leave out one of them"):
            await client.generate_stream([5, 6, 7], **asked).open()


async def test_a_deployment_without_them_refuses_who_asks_and_ignores_who_says_what_is_known(http):
    asked = await http.post("/v1/completions", json={"prompt": [5, 6], "return_routed_experts": True})
    known = await http.post(
        "/inference/v1/generate", json={"token_ids": [5], "sampling_params": {"routed_experts_prompt_start": 1}}
    )
    assert asked.status_code == 422 and "engine.return_routed_experts" in asked.json()["error"]["message"]
    assert known.status_code == 200 and "routed_experts" not in known.json()["choices"][0]


async def test_a_start_beyond_the_prompt_is_refused(routing):
    async with client_of(routing) as client:
        with pytest.raises(InvalidRequest, match=r"routed_experts_prompt_start=3 is beyond the prompt's 2 tokens"):
            await client.generate([5, 6], routed_experts_prompt_start=3)
