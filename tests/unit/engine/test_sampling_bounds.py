"""What our sampling parameters accept, vLLM's own validation accepts, as it is, and can send to its engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm.inputs import tokens_input
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_STOP_TOKEN_IDS

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import vllm_sampling
from rollout_service.engine.args import engine_args
from rollout_service.engine.plugin import register
from rollout_service.errors import InvalidRequest
from rollout_service.gateway.completions import CompletionRequest
from rollout_service.gateway.prompts import check_prompt, within_context
from rollout_service.model.tiny import character_tokenizer, make_tiny_qwen3
from rollout_service.protocol.sampling import LARGEST_SEED, Sampling

CONTEXT, VOCABULARY = 64, len(character_tokenizer())

integers = (
    st.integers(-2, CONTEXT + 2) | st.integers() | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**70])
)
floats = st.floats(0, 2) | st.floats(0, 200) | st.floats() | st.sampled_from([1e-300, 1e-5, 0.009, 0.01, 2.1, 1e300])
text = st.text(st.characters(codec=None), max_size=4)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 8) | integers,
    "max_tokens": st.none() | st.integers(1, CONTEXT) | integers,
    "min_tokens": integers,
    "temperature": floats,
    "top_p": floats,
    "top_k": integers,
    "min_p": floats,
    "repetition_penalty": floats,
    "presence_penalty": floats,
    "frequency_penalty": floats,
    "seed": st.none() | integers | st.integers(-(2**63), LARGEST_SEED),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | integers,
    "prompt_logprobs": st.none() | integers,
    "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
    "structured_outputs": st.sampled_from(
        [None, {"json": {"type": "object"}}, {"json_object": True}, {"regex": "[ab]+"}, {"choice": ["a", "bc"]}]
    ),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stop": st.lists(text, max_size=3) | st.just([""]) | st.just(["x" * 2000]),
    "stop_token_ids": st.lists(st.integers(-1, VOCABULARY), max_size=130, unique=True) | st.lists(integers, max_size=3),
}
samplings = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    """vLLM's, of the engine that the service would start."""
    path = tmp_path_factory.mktemp("model") / "tiny-qwen3"
    make_tiny_qwen3(path)
    config = ServiceConfig.model_validate({"model": {"path": path}, "engine": {"max_model_len": CONTEXT}})
    register()
    return InputProcessor(engine_args(config, (), has_tokenizer=True).create_engine_config())


def gateway() -> Any:
    """What the gateway knows of the model."""
    return SimpleNamespace(
        name="m",
        vocab_size=VOCABULARY,
        max_model_len=CONTEXT,
        tokenizer=character_tokenizer(),
        max_logprobs=20,
        returns_masks=False,
    )


def accepted(fields: dict[str, Any], prompt_tokens: int) -> Sampling | None:
    """What the gateway would hand to an engine; None if it refuses."""
    try:
        sampling = Sampling.model_validate(fields)
        check_prompt([5] * prompt_tokens, sampling, gateway())
    except (ValidationError, InvalidRequest):
        return None
    return within_context(prompt_tokens, sampling, CONTEXT)


@settings(max_examples=300)
@example(fields={"n": 2, "seed": 2**63 - 1}, prompt_tokens=2)  # the second completion's would be 2**63
@given(fields=samplings, prompt_tokens=st.just(2) | st.integers(0, CONTEXT + 1))
def test_vllm_takes_what_we_accept_and_takes_it_as_it_is(processor, fields, prompt_tokens):
    sampling = accepted(fields, prompt_tokens)
    if sampling is None:
        return
    request = processor.process_inputs(
        "r", tokens_input([5] * prompt_tokens), vllm_sampling(sampling), supported_tasks=("generate",)
    )
    processor.assign_request_id(request)
    assert request.sampling_params is not None
    asked, taken = sampling.model_dump(), request.sampling_params
    as_asked = ("n", "max_tokens", "min_tokens", "temperature", "repetition_penalty", "presence_penalty")
    as_asked += ("prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output")
    assert all(getattr(taken, name) == asked[name] for name in as_asked)
    assert taken.seed == (None if asked["seed"] == -1 else asked["seed"])
    if sampling.temperature > 0:
        assert all(getattr(taken, name) == asked[name] for name in ("top_p", "top_k", "min_p"))
    # what only fails in the engine's process, which then is dead
    factors = np.float32([taken.repetition_penalty, 1 / taken.repetition_penalty])
    assert np.isfinite(factors).all() and (factors > 0).all()
    for index in {0, sampling.n - 1}:
        _, child = ParentRequest(request).get_child_info(index)
        assert child.seed is None or -(2**63) <= child.seed < 2**63
        MsgpackEncoder().encode(child)
    MsgpackEncoder().encode(request)


@given(samplings, st.none() | text | st.lists(text, max_size=2))
def test_every_accepted_completion_request_has_sampling_params(fields, stop):
    try:
        request = CompletionRequest.model_validate({"prompt": [5], **fields, "stop": stop})
    except ValidationError:
        return
    assert request.sampling().n == request.n


def test_stop_tokens_leave_room_for_the_models_own_and_what_vllm_refuses_is_an_invalid_request():
    taken = vllm_sampling(Sampling(min_tokens=1, stop_token_ids=tuple(range(64))))
    assert len(taken.all_stop_token_ids) + 16 <= MAX_NUM_STOP_TOKEN_IDS
    with pytest.raises(InvalidRequest, match="min_tokens must be less than or equal to max_tokens=2"):
        vllm_sampling(Sampling(min_tokens=3, max_tokens=2))
