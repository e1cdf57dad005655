"""Requests for routed experts, up to the engine and back."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import GenerateCall
from tests.unit.gateway.fakes import EchoEngine, client_of, http_to, with_engine


class RoutingEngine(EchoEngine):
    """Says of token i that it went to the experts i and i + 1, if it is asked."""

    async def generate(self, call: GenerateCall) -> Rollout:
        rollout, start = await super().generate(call), call.sampling.routed_experts_prompt_start
        if start is None:
            return rollout
        tokens = range(start, len(call.prompt_token_ids) + len(rollout.completions[0].token_ids) - 1)
        told = RoutedExperts.of(np.array([[[i, i + 1]] for i in tokens], np.uint8).reshape(-1, 1, 2), start)
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
