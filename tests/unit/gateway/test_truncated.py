"""Truncated sampling as the gateway's callers see it: what is marked, and what sampling masks ask of requests."""

from dataclasses import replace
from typing import Any

import pytest

from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.mismatch import MismatchTable
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall
from tests.unit.gateway.fakes import EchoEngine, client_of, http_to, with_engine
from tests.unit.monitor.reports import body, full

TRUNCATED: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.01}, {"min_tokens": 1}, {"min_tokens": 1, "temperature": 0}
]  # fmt: skip
WHOLE: list[dict[str, Any]] = [
    {}, {"top_k": 0}, {"top_k": -1}, {"temperature": 0.5}, {"frequency_penalty": 1.0}, {"stop_token_ids": [3]},
    {"top_k": 100_000_000},  # AReaL's default
    {"temperature": 0, "top_p": 0.9},  # greedy: vLLM leaves the cut-offs out
]  # fmt: skip
MARKS = [(sampling, True) for sampling in TRUNCATED] + [(sampling, False) for sampling in WHOLE]


@pytest.mark.parametrize(("sampling", "marked"), MARKS, ids=str)
async def test_a_reply_says_whether_its_sampling_was_truncated(http, sampling, marked):
    generated = await http.post("/inference/v1/generate", json={"token_ids": [5, 6, 7], "sampling_params": sampling})
    completed = await http.post("/v1/completions", json={"prompt": [5, 6, 7], **sampling})
    assert generated.json()["truncated_sampling"] is marked
    assert completed.json()["truncated_sampling"] is marked


async def test_the_client_and_the_monitor_know_it_too(client, http):
    rollout = await client.generate([5, 6, 7], top_p=0.9)
    assert rollout.truncated_sampling and not (await client.generate([5, 6, 7])).truncated_sampling
    sampled = full([-1.0] * 3, [*rollout.completions[0].logprobs])
    report = body(sampled, truncated_sampling=rollout.truncated_sampling)
    assert (await http.post("/v1/mismatch", content=report)).json()["truncated_tokens"] == 3
    table = MismatchTable.model_validate_json((await http.get("/v1/mismatch")).content)
    metrics = [row.tokens for row in table.truncated]
    assert table.rows == () and metrics == [3]


class MaskingEngine(EchoEngine):
    """Says of every completion what it was drawn from."""

    async def generate(self, call: GenerateCall) -> Rollout:
        rollout = await super().generate(call)
        masked = [c.model_copy(update={"packed_sampling_mask": ("chunk",)}) for c in rollout.completions]
        return rollout.model_copy(update={"completions": tuple(masked)})


@pytest.fixture
def masking(services: Services) -> Services:
    return replace(with_engine(services, MaskingEngine()), returns_masks=True)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({}, "top_k=0:"),
        ({"top_k": -1, "top_p": 0.9}, "top_k=-1:"),
        ({"top_k": 5, "temperature": 0}, "temperature=0.0:"),
        ({"temperature": 0}, "top_k=0 and temperature=0.0:"),
    ],
    ids=str,
)
async def test_a_deployment_with_masks_refuses_what_vllm_would(masking, sampling, named):
    async with http_to(masking) as http:
        for path, asked in (
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": sampling}),
            ("/v1/completions", {"prompt": [5], **sampling}),
        ):
            reply = await http.post(path, json=asked)
            error = reply.json()["error"]
            assert reply.status_code == 422
            assert error["message"].startswith(named) and "engine.return_sampling_mask" in error["message"]


async def test_masks_come_back_with_the_choices_and_to_the_client(masking):
    async with http_to(masking) as http:
        completed = await http.post("/v1/completions", json={"prompt": [5, 6], "top_k": 3, "n": 2})
    assert [choice["packed_sampling_mask"] for choice in completed.json()["choices"]] == [["chunk"]] * 2
    async with client_of(masking) as client:
        rollout = await client.generate([5, 6], top_k=3)
    assert rollout.completions[0].packed_sampling_mask == ("chunk",)
