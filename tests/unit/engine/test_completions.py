"""What becomes of vLLM's final output."""

import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import WeightVersionSpan

from rollout_service.engine.adapter import completions
from rollout_service.errors import EngineFailed, InvalidRequest
from rollout_service.protocol.rollout import Span
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


def test_a_structure_that_was_made_is_a_completion() -> None:
    first, second = completions(output("stop", "length"), DIGITS)
    assert (first.finish_reason, second.finish_reason) == ("stop", "length") and second.index == 1
    assert (first.token_ids, first.logprobs, first.spans) == ((7,), (-0.5,), (Span(version=3, start=0, end=1),))


@pytest.mark.parametrize("finish_reasons", [("error", "error"), ("stop", "error")])
def test_a_structure_that_vllm_cannot_make_is_a_422(finish_reasons: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completions(output(*finish_reasons), DIGITS)
    assert refused.value.message == 'vLLM cannot make what {"regex":"[0-9]{3}"} describes'
    assert refused.value.http_status == 422


def test_an_error_without_a_structure_is_the_engines() -> None:
    with pytest.raises(EngineFailed, match="finish_reason='error'") as failed:
        completions(output("error"), Sampling())
    assert failed.value.http_status == 500
