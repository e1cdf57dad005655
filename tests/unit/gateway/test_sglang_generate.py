"""SGLang's ``/generate``, from the bodies of slime 624b824 and AReaL cbff54d."""

from dataclasses import replace
from typing import Any

import pytest

from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.rollout import Candidate
from tests.unit.gateway.chats import ScriptedEngine, ids
from tests.unit.gateway.fakes import EchoEngine, http_to, with_engine

SLIME = {
    "input_ids": [5, 6, 7],
    "sampling_params": {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 3,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 2**62,
    },
    "return_logprob": True,
}

ROUTED = {
    "model": None,
    "input_ids": [5, 6, 7],
    "sampling_params": {
        "temperature": 0.8,
        "max_new_tokens": 3,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": 2**62,
    },
    "return_logprob": True,
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
"""What sglang-router 0.3.2 makes of it."""


async def post(services: Services, body: Any, engine: Any = None, headers: dict[str, str] | None = None) -> Any:
    if engine is not None:
        services = with_engine(services, engine)
    async with http_to(services, "192.0.2.1") as http:
        return await http.post("/generate", json=body, headers=headers)


@pytest.mark.parametrize("body", [SLIME, ROUTED], ids=["direct", "through its router"])
async def test_slime_s_request_has_sglang_s_reply(services, engine, body):
    engine.cached_tokens = 2
    reply = (await post(services, body, headers={"X-SMG-Routing-Key": "session-1"})).json()
    meta = reply.pop("meta_info")
    assert meta.pop("e2e_latency") >= 0 and meta.pop("id")
    assert reply == {"text": services.tokenizer.decode([7, 6, 5]), "output_ids": [7, 6, 5]}
    assert meta == {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "7",
        "weight_version_start": 7,
        "weight_version_end": 7,
        "weight_versions": [{"version": "7", "start": 0, "end": 3, "replica_id": "r1"}],
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 6, None], [-1.5, 5, None]],
    }
    [call] = engine.calls
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.8, -1, 3, 2**62)
    assert call.session_id == "session-1"


async def test_areal_s_request_is_answered(services, engine):
    """AReaL 1.0.4's SGLangBackend, for a prompt without images."""
    body = {
        "input_ids": [5, 6, 7],
        "image_data": [],
        "sampling_params": {
            "top_p": 1.0, "top_k": 100_000_000, "max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": [],
            "ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0,
        },
        "return_logprob": True,
        "stream": False,
    }  # fmt: skip
    reply = await post(services, body)
    assert reply.status_code == 200 and reply.json()["output_ids"] == [7, 6, 5]
    assert not engine.calls[0].sampling.is_truncated


async def test_what_is_left_out_is_sglang_s_default(services, engine):
    services = replace(services, max_model_len=4096)
    reply = (await post(services, {"input_ids": [5]})).json()
    assert "output_token_logprobs" not in reply["meta_info"]
    [call] = engine.calls
    assert (call.sampling.max_tokens, call.sampling.temperature, call.sampling.top_k) == (128, 1.0, -1)


async def test_every_sampling_parameter_reaches_the_engine(services, engine):
    given = {
        "n": 2, "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": "ab",
        "stop_token_ids": [3], "ignore_eos": True, "sampling_seed": 11, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert (await post(services, {"input_ids": [5], "sampling_params": given})).status_code == 200
    [call] = engine.calls
    assert call.sampling.model_dump(exclude_defaults=True) == {
        "n": 2, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ("ab",),
        "stop_token_ids": (3,), "ignore_eos": True, "seed": 11, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ({"input_ids": [[5, 6]]}, [[6, 5]]),
        ({"input_ids": [[5, 6], [7]]}, [[6, 5], [7]]),
        ({"input_ids": [[5, 6], [7]], "sampling_params": {"n": 2, "max_new_tokens": 2}}, [[6, 5], [6, 5], [7], [7]]),
        ({"input_ids": [5, 6], "sampling_params": {"n": 2, "max_new_tokens": 2}}, [[6, 5], [6, 5]]),
    ],
)
async def test_several_completions_are_a_list_in_prompt_order(services, body, outputs):
    body = {"sampling_params": {"max_new_tokens": 2}, **body, "rid": "r"}
    made = (await post(services, body)).json()
    assert [each["output_ids"] for each in made] == outputs


async def test_text_is_tokenized(services, engine):
    one = (await post(services, {"text": "12", "sampling_params": {"max_new_tokens": 2}})).json()
    assert one["text"] == "21" and one["meta_info"]["prompt_tokens"] == 2
    two = (await post(services, {"text": ["12", "3"], "sampling_params": {"max_new_tokens": 2}})).json()
    assert [each["text"] for each in two] == ["21", "3"]


@pytest.mark.parametrize(
    ("stop_reason", "sampling", "told", "text"),
    [
        ("3", {}, {"type": "stop", "matched": "3"}, "12"),
        ("3", {"no_stop_trim": True}, {"type": "stop", "matched": "3"}, "123"),
        ("id of 3", {}, {"type": "stop", "matched": "id of 3"}, "12"),
        ("id of 3", {"no_stop_trim": True}, {"type": "stop", "matched": "id of 3"}, "123"),
        (None, {}, {"type": "stop", "matched": "id of 3"}, "12"),
    ],
)
async def test_how_a_completion_ended_is_told_and_trimmed(services, stop_reason, sampling, told, text):
    *_, three = ids = tuple(services.tokenizer.encode("123"))
    engine = ScriptedEngine(tokens=ids, stop_reason=three if stop_reason == "id of 3" else stop_reason)
    told = {key: three if value == "id of 3" else value for key, value in told.items()}
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 8, **sampling}}
    reply = (await post(services, body, engine)).json()
    assert reply["meta_info"]["finish_reason"] == told
    assert reply["text"] == text and reply["output_ids"] == list(ids)


async def test_miles_request_is_answered(services, engine):
    """miles 31f1ca9: ``miles/rollout/generate_utils/generate_endpoint_utils.py`` and ``sglang_rollout.py``."""
    sampling = {**SLIME["sampling_params"]}
    del sampling["sampling_seed"]
    asked = {"return_routed_experts": False, "return_indexer_topk": False, "extra_key": "run-a:v3", "rid": "run-a-1"}
    reply = (await post(services, {**SLIME, "sampling_params": sampling, **asked}, engine)).json()
    assert reply["meta_info"]["id"] == "run-a-1" and "routed_experts" not in reply["meta_info"]
    assert engine.calls[0].cache_salt == "run-a:v3"


class TestTeachers:
    """Prompts' logprobs, as slime 624b824, miles and AReaL 1.0.4 ask their teachers for them.

    ``slime/rollout/on_policy_distillation.py``, ``miles/rollout/generate_utils/prefill_logprobs.py`` and AReaL's
    ``engine/sglang_remote.py``.
    """

    ROWS = (None, (Candidate(6, -2.0, 3),), (Candidate(7, -0.25, 1),))

    @pytest.fixture
    def teacher(self, engine: EchoEngine) -> EchoEngine:
        engine.prompt_logprobs = self.ROWS
        return engine

    @pytest.mark.parametrize("start", [0, 1])
    async def test_a_prompt_alone_is_scored(self, services, teacher, start):
        sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
        reply = (await post(services, {**body, "logprob_start_len": start})).json()
        meta = reply["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 5, None], [-2.0, 6, None], [-0.25, 7, None]][start:]
        assert (reply["text"], reply["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
        assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["completion_tokens"] == 0
        assert meta["weight_version"] == "7" and meta["weight_versions"] == []
        [call] = teacher.calls
        assert (call.sampling.max_tokens, call.sampling.prompt_logprobs) == (1, 0)

    async def test_a_completion_comes_with_its_prompts_logprobs(self, services, teacher):
        """AReaL asks for one token, and miles for several prompts at once."""
        body = {"input_ids": [[5, 6, 7]] * 2, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        asked = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 0, "stream": False}
        for reply in (await post(services, {**body, **asked})).json():
            assert [row[0] for row in reply["meta_info"]["input_token_logprobs"]] == [-2.0, -0.25]
            assert reply["output_ids"] == [7, 6, 5] and len(reply["meta_info"]["output_token_logprobs"]) == 3

    @pytest.mark.parametrize("asked", [{}, {"return_logprob": True}, {"logprob_start_len": 0}])
    async def test_nothing_is_scored_unless_asked(self, services, teacher, asked):
        reply = await post(services, {"input_ids": [5, 6, 7], "logprob_start_len": -1, **asked})
        assert "input_token_logprobs" not in reply.json()["meta_info"]
        assert teacher.calls[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize(("cut_after", "version"), [(4, "4"), (0, None)])
async def test_an_aborted_completion_comes_back_as_it_is(services, cut_after, version):
    engine = ScriptedEngine(cut_after=cut_after)
    reply = (await post(services, {"input_ids": [5], "sampling_params": {"max_new_tokens": 8}}, engine)).json()
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and reply["output_ids"] == list(ids("hello")[:cut_after])
    assert meta.get("weight_version") == version  # of the last token
    assert meta.get("weight_version_end") == (4 if version else None) and len(engine.calls) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": None}, "give either input_ids or text"),
        ({"text": "1"}, "give either input_ids or text"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [[5]] * 4097}, "4097 prompts with n=1"),
        ({"stream": True}, "stream"),
        ({"return_logprob": True, "logprob_start_len": 1}, "logprob_start_len=1 is not a token of a prompt that has 1"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_indexer_topk": True}, "return_indexer_topk"),
        ({"lora_path": ["a"]}, "lora_path"),
        ({"image_data": "a"}, "image_data"),
        ({"image_data": ["a"]}, "image_data"),
        ({"audio_data": []}, "audio_data is not a field here, or not implemented"),
        ({"sampling_params": {"regex": "a"}}, "sampling_params.regex is not a field here, or not implemented"),
        ({"sampling_params": {"temperature": 3.0}}, "temperature Input should be less than or equal to 2"),
        ({"sampling_params": {"sampling_seed": 2**64}}, "sampling_seed Input should be less than"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0 returns only logprobs of the prompt"),
        ({"sampling_params": [{"n": 1}]}, "sampling_params"),
        ({"input_ids": [10**6]}, "token id 1000000 at position 0 is outside the vocabulary"),
        ({"input_ids": [5] * 64}, "leave no room for a completion in this model's maximum context length"),
        ({"input_ids": [[5], [10**6]]}, "prompt 1 of 2, counted from 0: token id 1000000 at position 0"),
    ],
)
async def test_what_cannot_be_done_is_a_400_by_name(services, engine, change, says):
    reply = await post(services, {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}, **change})
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]
    assert engine.calls == []
