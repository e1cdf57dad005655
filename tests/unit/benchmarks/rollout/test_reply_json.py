"""Both forms of a reply say the same, through the gateway's real route."""

import json

import httpx

from benchmarks.rollout.reply_json import ROUTE, ByToken, ReadyEngine, posted, services
from rollout_service.client._generate import body_of, request_of, rollout_of
from rollout_service.gateway.deployment import create_app
from rollout_service.protocol.sampling import Sampling


async def test_both_forms_of_a_reply_hold_the_same_tokens() -> None:
    app = create_app(services(ReadyEngine(n=2, tokens=5)))
    asked = request_of([1, 2, 3], Sampling(n=2, max_tokens=5))
    flat = body_of(asked)
    by_token = {name: value for name, value in flat.items() if name != "flat_logprobs"}
    replies = [await posted(app, json.dumps(body).encode()) for body in (flat, by_token)]
    response = httpx.Response(200, content=replies[0], request=httpx.Request("POST", f"http://service{ROUTE}"))
    for read, other in zip(
        rollout_of(response, asked).completions, ByToken.model_validate_json(replies[1]).choices, strict=True
    ):
        assert read.token_ids == other.token_ids == tuple(token.token_id for token in other.logprobs.content)
        assert read.logprobs == tuple(token.logprob for token in other.logprobs.content)
