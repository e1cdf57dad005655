"""What becomes of vLLM's final output."""

import numpy as np
import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import WeightVersionSpan

from rollout_service.engine.adapter import completions, routed_experts, vllm_sampling
from rollout_service.errors import EngineFailed, InvalidRequest
from rollout_service.protocol.rollout import Candidate, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import Sampling, StructuredOutputs

DIGITS = Sampling(n=2, structured_outputs=StructuredOutputs(regex="[0-9]{3}"))


def output(*finish_reasons: str) -> RequestOutput:
    """Of a prompt with a completion of one token for each of ``finish_reasons``."""
    logprobs = FlatLogprobs()
    logprobs.append({7: Logprob(-0.5, 1, None)})
    outputs = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=[7],
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason=reason,
            weight_versions=[WeightVersionSpan("3", 0, 1)],
        )
        for index, reason in enumerate(finish_reasons)
    ]
    return RequestOutput("r", None, [1], None, outputs, finished=True)


def test_a_structure_that_was_made_is_a_completion():
    first, second = completions(output("stop", "length"), DIGITS)
    assert (first.finish_reason, second.finish_reason) == ("stop", "length") and second.index == 1
    assert (first.token_ids, first.logprobs, first.spans) == ((7,), (-0.5,), (Span(version=3, start=0, end=1),))


@pytest.mark.parametrize("finish_reasons", [("error", "error"), ("stop", "error")])
def test_a_structure_that_vllm_cannot_make_is_a_422(finish_reasons):
    with pytest.raises(InvalidRequest) as refused:
        completions(output(*finish_reasons), DIGITS)
    assert refused.value.message == 'vLLM cannot make what {"regex":"[0-9]{3}"} describes'
    assert refused.value.http_status == 422


def test_an_error_without_a_structure_is_the_engines():
    with pytest.raises(EngineFailed, match="finish_reason='error'") as failed:
        completions(output("error"), Sampling())
    assert failed.value.http_status == 500


def chosen(tokens: int) -> np.ndarray:
    """Of one layer: expert 0 and another. Shape [tokens, 1, 2]."""
    return np.array([[[0, token + 1]] for token in range(tokens)], np.uint8).reshape(-1, 1, 2)


def routed(experts: np.ndarray | None, reason: str = "stop", start: int | None = 1) -> RoutedExperts | None:
    """Return what becomes of the experts of one sampled token after a prompt of two."""
    asked = output(reason)
    asked.prompt_token_ids, asked.outputs[0].routed_experts = [1, 2], experts
    return completions(asked, Sampling(routed_experts_prompt_start=start))[0].routed_experts


def test_routed_experts_begin_where_they_were_asked_for():
    assert routed(chosen(1)) == RoutedExperts.of(chosen(1), 1)
    assert routed(chosen(1), start=None) is None
    cut = routed(chosen(0), "abort")  # an abort may leave rows untold
    assert cut is not None and cut.shape == (0, 1, 2)
    assert routed(np.zeros((1, 3, 1), np.uint8)) is not None  # expert 0 may be the only one of a token
    nothing = output("abort").outputs[0]
    nothing.token_ids = []
    assert routed_experts(nothing, 1, 2) is None


@pytest.mark.parametrize(
    ("experts", "error", "says"),
    [
        (None, EngineFailed, "told no routed experts with a completion of 1 tokens"),
        (chosen(2), EngineFailed, "of 2 tokens, where 1 were read from 1 on"),
        (
            np.zeros((1, 3, 2), np.uint8),
            InvalidRequest,
            r"does not tell what it chose\. Set engine\.return_routed_experts: false",
        ),
    ],
    ids=["none", "too many", "an untelling kernel"],
)
def test_routed_experts_that_cannot_be_right_fail_the_request(experts, error, says):
    with pytest.raises(error, match=says):
        routed(experts)


def test_an_engine_that_notes_experts_leaves_out_the_prompts_where_nobody_asked():
    assert vllm_sampling(Sampling(), 7).routed_experts_prompt_start == 7
    assert vllm_sampling(Sampling(routed_experts_prompt_start=2), 7).routed_experts_prompt_start == 2


def test_candidates_of_a_prompt_are_those_with_a_finite_logprob():
    asked = output("length", "length")
    asked.prompt_token_ids, asked.prompt_logprobs = [1, 7, 9], FlatLogprobs()
    asked.prompt_logprobs.append(None)
    asked.prompt_logprobs.append({7: Logprob(-2.5, 3, None), 4: Logprob(-0.25, 1, None)})
    asked.prompt_logprobs.append({9: Logprob(-0.5, 1, None), 5: Logprob(-np.inf, None, None)})
    first, second = completions(asked, Sampling(n=2, prompt_logprobs=1))
    rows = [None, (Candidate(7, -2.5, 3), Candidate(4, -0.25, 1)), (Candidate(9, -0.5, 1),)]
    assert list(first.prompt_logprobs) == list(second.prompt_logprobs) == rows
    alone = output("length")
    alone.prompt_logprobs = FlatLogprobs()
    alone.prompt_logprobs.append(None)
    assert list(completions(alone, Sampling(prompt_logprobs=1))[0].prompt_logprobs) == [None]
