"""The mismatch of tokens that several versions sampled."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.training.overlapped import (
    MismatchByAge,
    OverlappedStep,
    logprobs_of_versions,
    of_tokens,
    snapshot,
    train,
)
from examples import grpo
from rollout_service.protocol.rollout import Completion, Rollout, Span
from tests.support.models import config_of

PROMPT, TOKENS = (5, 6, 7), (11, 12, 13, 14)
SPANS = (Span(version=3, start=0, end=1), Span(version=4, start=1, end=4, kv_from=3))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(request.param), dtype=torch.float32)
    return made


@pytest.fixture
def rollouts() -> list[Rollout]:
    def completion(index: int, count: int) -> Completion:
        spans = tuple(span.model_copy(update={"end": min(span.end, count)}) for span in SPANS if span.start < count)
        logprobs = (-5.0,) * count
        return Completion(
            index=index, token_ids=TOKENS[:count], logprobs=logprobs, finish_reason="stop", spans=spans, text=""
        )

    def rollout(prompt: tuple[int, ...]) -> Rollout:
        made = (completion(0, 4), completion(1, 1))
        return Rollout(request_id="a", replica_id="r", prompt_token_ids=prompt, completions=made)

    return [rollout(PROMPT), rollout((9, *PROMPT))]


class Tokenizer:
    pad_token_id = 0


def batch_of(rollouts: list[Rollout]) -> grpo.Batch:
    task = grpo.Task(lambda rng, count: [], lambda prompt, text: 0.0, 2, 2, 4, 1e-3)
    return grpo.make_batch(task, ["", ""], rollouts, Tokenizer())


def test_each_token_is_scored_by_the_weights_that_sampled_it(model, rollouts):
    batch, weights, expected = batch_of(rollouts), {}, {}
    for version in (3, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter + 0.01 * torch.randn_like(parameter)).bfloat16())
            logits = model(torch.tensor([[*PROMPT, *TOKENS]])).logits[0, len(PROMPT) - 1 : -1]
            expected[version] = logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS)[:, None])[:, 0]
        weights[version] = snapshot(model)
    found = grpo.of_completions(logprobs_of_versions(model, weights, rollouts, batch, torch.float32), batch)
    whole = torch.cat([expected[3][:1], expected[4][1:]])
    assert torch.allclose(found[0], whole, atol=1e-4) and torch.allclose(found[1], whole[:1], atol=1e-4)
    assert not torch.allclose(found[0], expected[4], atol=1e-2)


def test_mismatch_is_split_by_the_age_of_keys_and_values(rollouts):
    batch = batch_of(rollouts)
    ages = of_tokens(rollouts, batch, lambda span: span.version - span.oldest_kv)
    logprobs = torch.where(ages == 1, torch.tensor(-5.0 + 0.5), torch.tensor(-5.0))
    mismatch = MismatchByAge()
    for _ in range(2):
        mismatch.add(OverlappedStep(4, batch, logprobs, {}, 0.0, 0.0, ages))
    fresh, older = mismatch.rows()
    assert (fresh["age"], fresh["tokens"], fresh["k3"], fresh["prob_error"]) == (0, 8, 0.0, 1.0)
    assert (older["age"], older["tokens"]) == (1, 12)
    assert older["k3"] == pytest.approx(0.148721, abs=1e-5) and older["prob_error"] == pytest.approx(1.648721, abs=1e-5)


def test_an_age_is_compared_with_age_0_of_its_own_steps(rollouts):
    batch = batch_of(rollouts)
    ages = of_tokens(rollouts, batch, lambda span: span.version - span.oldest_kv)
    mismatch = MismatchByAge()
    for log_ratio, ages_of_step in ((0.0, ages), (0.5, torch.zeros_like(ages))):
        logprobs = torch.full(ages.shape, -5.0 + log_ratio)
        mismatch.add(OverlappedStep(4, batch, logprobs, {}, 0.0, 0.0, ages_of_step))
    fresh, older = mismatch.rows()
    assert fresh["k3"] == fresh["k3_of_age_0"] > 0 and fresh["prob_error"] == fresh["prob_error_of_age_0"] > 1
    assert (older["age"], older["k3_of_age_0"], older["prob_error_of_age_0"]) == (1, 0.0, 1.0)


class Client:
    """Samples each batch by the version that it must have at least, and keeps how old batches are once trained on."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self._rollouts = rollouts
        self.version = 0
        self.ages: list[int] = []

    def push_weights(self, version: str, weights: dict[str, torch.Tensor]) -> "Client":
        self.version += 1
        return self

    def generate_batch(self, prompts: list[str], *, min_weight_version: int, **_: object) -> list[Rollout]:
        def begun(completion: Completion) -> Completion:
            span = Span(version=min_weight_version, start=0, end=len(completion.token_ids))
            return completion.model_copy(update={"spans": (span,)})

        return [each.model_copy(update={"completions": tuple(map(begun, each.completions))}) for each in self._rollouts]

    def report_mismatch(self, rollouts: list[Rollout], logprobs: list[torch.Tensor]) -> None:
        self.ages.append(self.version - rollouts[0].completions[0].spans[0].version)


def test_no_batch_gets_older_than_the_batches_ahead(model, rollouts):
    task = grpo.Task(lambda rng, count: [""] * count, lambda prompt, text: 0.0, 2, 2, 4, 1e-3)
    client = Client(rollouts)
    steps = list(train(client, model, Tokenizer(), 5, 0, task=task, correction=grpo.TIS, ahead=2))
    assert [step.version for step in steps] == [1, 2, 3, 4, 5] and client.ages == [0, 1, 2, 2, 2]
