"""Logprobs of given tokens, as a teacher gives them."""

import base64
from dataclasses import replace

import numpy as np
import pytest

from rollout_service.errors import InvalidRequest
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.sampling import Scoring
from tests.unit.gateway.fakes import EchoEngine, http_to

TOKENS = [5, 6, 7, 8]
SCORES = CompactLogprobs.of([7, 3, 8, 4], [-0.5, -0.25, -1.5, -0.125], [0, 2, 4], 1)


@pytest.fixture
def scoring(engine: EchoEngine) -> EchoEngine:
    engine.scores = SCORES
    return engine


async def test_lists_have_each_token_and_the_likeliest(http, scoring):
    reply = await http.post("/inference/v1/score", json={"token_ids": TOKENS, "start": 2, "top_logprobs": 1})
    found = reply.json()
    assert (found["token_ids"], found["logprobs"]) == ([[7, 3], [8, 4]], [[-0.5, -0.25], [-1.5, -0.125]])
    assert (found["start"], found["weight_version"], found["replica_id"]) == (2, "7", "r1")
    [call] = scoring.calls
    assert (call.sampling.max_tokens, call.sampling.prompt_logprobs, call.scoring) == (1, 1, Scoring(start=2))


async def test_packed_scores_have_the_format_of_renderers(http, scoring):
    body = {"token_ids": TOKENS, "start": 2, "top_logprobs": 1, "compact": True}
    packed = (await http.post("/inference/v1/score", json=body)).json()["compact_logprobs"]
    data = base64.b64decode(packed["data"])
    assert np.frombuffer(data, "<u4", 4).tolist() == [7, 3, 8, 4]
    assert np.frombuffer(data, "<f4", 4, 16).tolist() == [-0.5, -0.25, -1.5, -0.125]
    assert (packed["format"], packed["offsets"], packed["num_top_logprobs"]) == ("u32-f32-le-v1", [0, 2, 4], 1)


async def test_target_tokens_reach_the_engine(client, scoring):
    scores = await client.score(TOKENS, start=2, target_token_ids=[[7, 3], [8, 4]])
    assert scores.token_ids.tolist() == [7, 3, 8, 4] and scores.offsets.tolist() == [0, 2, 4]
    assert (scores.weight_version, scores.start) == (7, 2)
    [call] = scoring.calls
    assert call.sampling.prompt_logprobs is None
    assert call.scoring == Scoring(start=2, target_token_ids=((7, 3), (8, 4)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"start": 4}, "start=4, and there are 4 tokens"),
        ({"start": 0}, "greater than or equal to 1"),
        ({"top_logprobs": 21}, "top_logprobs: this deployment returns at most 20"),
        ({"top_logprobs": 1, "target_token_ids": [[1]] * 3}, "send one of them"),
        ({"target_token_ids": [[1]] * 2}, "target_token_ids has 2 lists, and 3 tokens are scored"),
        ({"target_token_ids": [[1], [2], [1] * 21]}, "target_token_ids: this deployment returns at most 20"),
        ({"target_token_ids": [[1], [2], [10**6]]}, "target token id 1000000 of position 3 is outside"),
        ({"on_abort": "return"}, "no partial result"),
        ({"return_routed_experts": True}, "no routed experts"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(http, scoring, options, why):
    refused = await http.post("/inference/v1/score", json={"token_ids": TOKENS, **options})
    assert refused.status_code == 422 and why in refused.text
    assert not scoring.calls


@pytest.mark.parametrize("path", ["/infer/", "/get_sequence_logprobs/"])
async def test_teachers_routes_of_other_servers_are_refused(http, path):
    """ms-swift 4.6.0's ``VLLMInferClient`` and TRL's client before 1.11, which write the last slash."""
    refused = await http.post(path, json={"infer_requests": [], "request_config": {}}, follow_redirects=True)
    assert refused.status_code == 422 and "POST /v1/completions with prompt_logprobs" in refused.text


async def test_more_than_json_holds_must_be_packed(services, scoring):
    wide = replace(services, max_logprobs=1 << 20)
    async with http_to(wide) as http:
        body = {"token_ids": TOKENS, "top_logprobs": (1 << 20) // 3}
        refused = await http.post("/inference/v1/score", json=body)
        assert refused.status_code == 422 and "set compact to true" in refused.text
        assert (await http.post("/inference/v1/score", json={**body, "compact": True})).status_code == 200


async def test_packed_scores_may_exceed_what_lists_may(http, scoring, monkeypatch):
    monkeypatch.setattr("rollout_service.gateway.prompts.MAX_PROMPT_LOGPROBS", 7)
    body = {"token_ids": TOKENS, "sampling_params": {"prompt_logprobs": 1}}
    refused = await http.post("/inference/v1/generate", json=body)
    assert refused.status_code == 422 and "8 logprobs are more than the 7 that fit" in refused.text
    packed = {"token_ids": TOKENS, "top_logprobs": 1, "compact": True}
    assert (await http.post("/inference/v1/score", json=packed)).status_code == 200


async def test_scores_lost_with_their_replica_are_asked_for_again(http):
    reply = await http.post("/inference/v1/score", json={"token_ids": TOKENS})
    assert reply.status_code == 503 and "send it again" in reply.text


async def test_the_client_refuses_what_the_service_would(client, scoring):
    with pytest.raises(InvalidRequest, match="start=9, and there are 4 tokens"):
        await client.score(TOKENS, start=9)
    assert not scoring.calls
