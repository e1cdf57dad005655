"""What becomes of vLLM's final output."""

import numpy as np
import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import WeightVersionSpan

from rollout_service.engine.adapter import completions, vllm_sampling
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


def routed(output: RequestOutput, *experts: np.ndarray) -> RequestOutput:
    """Each completion with its [tokens, layers, topk]."""
    for made, each in zip(output.outputs, experts, strict=True):
        made.routed_experts = each
    return output


def chosen(tokens: int) -> np.ndarray:
    """Of one layer: expert 0 and another."""
    return np.array([[[0, token + 1]] for token in range(tokens)], np.uint8).reshape(-1, 1, 2)


FROM_1 = Sampling(routed_experts_prompt_start=1)


def test_routed_experts_begin_where_they_were_asked_for():
    asked = routed(output("stop", "length"), chosen(1), chosen(1))
    asked.prompt_token_ids = [1, 2]
    first, second = completions(asked, Sampling(n=2, routed_experts_prompt_start=1))
    assert first.routed_experts == second.routed_experts == RoutedExperts.of(chosen(1), 1)
    [unasked] = completions(routed(output("stop"), chosen(1)), Sampling())
    assert unasked.routed_experts is None


def test_an_abort_may_leave_rows_untold_and_a_completion_without_tokens_has_none():
    [cut] = completions(routed(output("abort"), chosen(0)), Sampling(routed_experts_prompt_start=0))
    assert cut.routed_experts is not None and cut.routed_experts.shape == (0, 1, 2)
    nothing = output("abort")
    nothing.outputs[0].token_ids, nothing.outputs[0].logprobs = [], FlatLogprobs()
    nothing.outputs[0].weight_versions = []
    assert completions(nothing, FROM_1)[0].routed_experts is None


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (None, "told no routed experts with a completion of 1 tokens"),
        (chosen(2), "of 2 tokens, where 1 were read from 1 on"),
    ],
    ids=["none", "too many"],
)
def test_routed_experts_that_cannot_be_right_fail_the_request(experts, says):
    asked = routed(output("stop"), experts)
    asked.prompt_token_ids = [1, 2]
    with pytest.raises(EngineFailed, match=says):
        completions(asked, FROM_1)


def test_a_kernel_that_does_not_tell_its_experts_is_no_lost_engine():
    asked = routed(output("stop"), np.zeros((1, 3, 2), np.uint8))
    asked.prompt_token_ids = [1, 2]
    with pytest.raises(InvalidRequest, match=r"does not tell what it chose\. Set engine\.return_routed_experts: false"):
        completions(asked, FROM_1)


def test_expert_0_may_be_the_only_one_of_a_token():
    asked = routed(output("stop"), np.zeros((1, 3, 1), np.uint8))
    asked.prompt_token_ids = [1, 2]
    assert completions(asked, FROM_1)[0].routed_experts is not None


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


def test_a_prompt_of_one_token_has_no_candidates():
    asked = output("length")
    asked.prompt_logprobs = FlatLogprobs()
    asked.prompt_logprobs.append(None)
    [made] = completions(asked, Sampling(prompt_logprobs=1))
    assert list(made.prompt_logprobs) == [None]
