"""Contracts of what cannot run here: the bodies that it sends, as its source makes them, and what it reads of replies.

Whole clients, as they were released, are in ``tests/clients``. The other contracts:

    prime-rl 559b447, admin      test_trainer_routes.py, tests/unit/gateway/test_update_weights.py
    slime 624b824, AReaL         test_trainer_routes.py, tests/unit/gateway/test_sglang_*.py
    vLLM 0.32, weight transfer   test_weight_transfer.py, tests/unit/gateway/test_vllm_weights.py
    the token routes             tests/unit/gateway/test_client_bodies.py
"""

from typing import Any

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from tests.support.models import random_weights
from tests.support.native_route import assert_as_native

MODEL = "tiny-qwen3"
HELLO = [{"role": "user", "content": "1+1"}]


@pytest.fixture
async def version(service: LocalService, client: RolloutClient, next_version: int) -> int:
    """Of random weights, which every replica serves."""
    await client.push_weights(next_version, random_weights(service.config.model.path, seed=next_version))
    return next_version


async def chat(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.client("NeMo-Gym")
class TestNeMoGym:
    """nemo-gym 0.4.0, responses_api_models/vllm_model/app.py with return_token_id_information."""

    BODY = {  # noqa: RUF012
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "parallel_tool_calls": True,
        "metadata": {"chat_template_kwargs": "{}"},
        "model": MODEL,
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }

    async def test_tokens_are_read_out_of_logprobs(self, http, client, version):
        """The prompt's ids come from /tokenize, at the root, with what the template was given."""
        [choice] = (await chat(http, self.BODY))["choices"]
        content = choice["logprobs"]["content"]
        tokens = [int(each["token"].removeprefix("token_id:")) for each in content]
        tokenized = {name: self.BODY[name] for name in ("model", "messages", "chat_template_kwargs")}
        prompt = (await http.post("/tokenize", json=tokenized)).json()["tokens"]
        await assert_as_native(client, prompt, tokens, [each["logprob"] for each in content], version=version)
        assert not choice["message"].get("reasoning") and not choice["message"].get("reasoning_content")

    async def test_turns_that_reasoned_are_taken(self, http):
        turn = {"role": "assistant", "content": "2", "reasoning_content": "one and one", "reasoning": "one and one"}
        messages = [*HELLO, turn, {"role": "user", "content": "sure?"}]
        assert (await chat(http, {**self.BODY, "messages": messages}))["choices"]


@pytest.mark.client("ART")
class TestART:
    """openpipe-art 0.5.23, art/model.py for a trainable model; its own Backend names the served model."""

    BODY = {  # noqa: RUF012
        "messages": HELLO,
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0.0,
        "logprobs": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "nvext": {"extra_fields": ["engine_data"]},
        "chat_template_kwargs": {"preserve_thinking": True},
    }

    async def test_a_choice_has_what_it_trains_on(self, http, client, version):
        """Its own token ids, the prompt's beside the choices, and a logprob of each token."""
        reply = await chat(http, self.BODY)
        [choice] = reply["choices"]
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        logprobs = [each["logprob"] for each in content]
        await assert_as_native(client, reply["prompt_token_ids"], choice["token_ids"], logprobs, version=version)


@pytest.mark.client("ms-swift's `InferClient`")
class TestMsSwift:
    """ms-swift 4.6.0."""

    async def test_its_client_for_inference_chats(self, http, client, version):
        """swift/infer_engine/infer_client.py: fields at their defaults are left out."""
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0.0, "logprobs": True, "seed": 42}
        reply = await chat(http, {**body, "top_logprobs": 2, "top_k": -1, "repetition_penalty": 1.0})
        assert reply["object"] == "chat.completion" and reply["usage"]["completion_tokens"] >= 1
        [choice] = reply["choices"]
        prompt = "user: 1+1\nassistant: "  # by the chat template
        [native] = (await client.generate(prompt, temperature=0.0, max_tokens=8)).completions
        assert choice["message"]["content"] == native.text and native.versions == (version,)
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(native.logprobs, abs=1e-4)
