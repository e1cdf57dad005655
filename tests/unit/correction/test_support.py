"""The trainer's logprobs over what truncated sampling kept, against a softmax over the kept logits alone."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import SamplingSupport, TruncatedSamplingWarning, correct, preset
from rollout_service.protocol import truncation
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling_mask import pack, unpack
from tests.unit.fleet.completions import completion_of

VOCABULARY = 12
COMPLETIONS = st.lists(
    st.lists(st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5).map(sorted), max_size=5),
    min_size=1,
    max_size=4,
).filter(any)


def made(*chunks: str) -> Completion:
    """A completion with these masks, whatever its tokens are; without any, one that was cut off before its first."""
    tokens = [0] * len(unpack(chunks)[0])
    return completion_of(tokens).model_copy(update={"packed_sampling_mask": chunks or None})


def batch(kept: list[list[list[int]]], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [batch, tokens, vocabulary], NaN at padding; a kept token of each position; the mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, kept))
    logits = torch.randn(len(kept), width, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    sampled = torch.zeros(len(kept), width, dtype=torch.int64)
    mask = torch.zeros(len(kept), width, dtype=torch.bool)
    for row, positions in enumerate(kept):
        mask[row, : len(positions)] = True
        for column, ids in enumerate(positions):
            sampled[row, column] = ids[seed % len(ids)]
    logits[~mask] = math.nan
    return logits, sampled, mask


@given(kept=COMPLETIONS, seed=st.integers(0, 100))
def test_it_is_log_softmax_over_the_kept_logits(kept, seed):
    logits, sampled, _ = batch(kept, seed)
    found = SamplingSupport.of([made(pack(row)) for row in kept]).renormalized(logits, sampled)
    for row, positions in enumerate(kept):
        wanted = [
            torch.log_softmax(logits[row, column, ids], 0)[ids.index(int(sampled[row, column]))].item()
            for column, ids in enumerate(positions)
        ]
        assert found[row, : len(positions)].tolist() == pytest.approx(wanted, abs=1e-9)
        assert not found[row, len(positions) :].any()


@given(kept=COMPLETIONS, seed=st.integers(0, 100))
def test_logits_logprobs_and_logprobs_at_kept_ids_give_the_same(kept, seed):
    logits, sampled, _ = batch(kept, seed)
    support = SamplingSupport.of([made(pack(row)) for row in kept])
    wanted = support.renormalized(logits, sampled)
    torch.testing.assert_close(support.renormalized(logits.log_softmax(-1), sampled), wanted)
    at_kept = logits.log_softmax(-1).gather(-1, support.token_ids)
    torch.testing.assert_close(support.renormalized_at(at_kept, sampled), wanted)


@given(kept=COMPLETIONS, seed=st.integers(0, 100))
def test_gradients_are_the_truncated_policys_and_zero_at_padding(kept, seed):
    logits, sampled, mask = batch(kept, seed)
    logits.requires_grad_()
    SamplingSupport.of([made(pack(row)) for row in kept]).renormalized(logits, sampled).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[~mask].any()
    for row, positions in enumerate(kept):
        for column, ids in enumerate(positions):
            wanted = torch.zeros(VOCABULARY, dtype=torch.float64)
            wanted[ids] = -torch.softmax(logits[row, column, ids].detach(), 0)
            wanted[int(sampled[row, column])] += 1
            torch.testing.assert_close(logits.grad[row, column], wanted)


@given(kept=COMPLETIONS, seed=st.integers(0, 100))
def test_a_perfect_version_is_perfect_again_whatever_was_cut_off(kept, seed):
    logits, sampled, mask = batch(kept, seed)
    support = SamplingSupport.of([made(pack(row)) for row in kept])
    rollout = support.renormalized(logits, sampled)  # what an engine with these very logits returns
    found = correct(support.renormalized(logits, sampled), rollout, mask, preset("seq_tis"))
    assert torch.equal(found.weights, mask.double())
    assert found.metrics["rollout_corr/token_mult_prob_error"] == 1.0


def test_half_precision_logits_are_widened_before_logsumexp():
    support = SamplingSupport.of([made(pack([[0, 1]]))])
    logits = torch.tensor([[[8.0, -8.0, 9.0]]], dtype=torch.bfloat16)
    found = support.renormalized(logits, torch.tensor([[1]]))
    assert found.dtype is torch.float32 and found.item() == pytest.approx(-16.0, abs=1e-5)


def test_chunks_of_two_engines_and_padding():
    support = SamplingSupport.of([made(pack([[1], [2, 3]]), pack([[4]])), made(pack([[5]])), made()], num_tokens=4)
    assert support.kept.sum(-1).tolist() == [[1, 2, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert support.token_ids[support.kept].tolist() == [1, 2, 3, 4, 5]


def test_what_does_not_fit_is_refused_with_its_place():
    support = SamplingSupport.of([made(pack([[1, 2], [3]]))])
    with pytest.raises(ValueError, match=r"sampled\[0, 1\] is token 2, which its sampling mask does not hold"):
        support.renormalized(torch.zeros(1, 2, 5), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"logits \[1, 3, 5\]"):
        support.renormalized(torch.zeros(1, 3, 5), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"at_kept \[1, 2, 1\]"):
        support.renormalized_at(torch.zeros(1, 2, 1), torch.tensor([[1, 2]]))
    masked = made(pack([[1]]))
    with pytest.raises(ValueError, match=r"completion 1 has 1 tokens and sampling masks of 0: .*return_sampling_mask"):
        SamplingSupport.of([masked, masked.model_copy(update={"packed_sampling_mask": None})])
    with pytest.raises(ValueError, match="2 tokens, more than num_tokens=1"):
        SamplingSupport.of([made(pack([[1], [2]]))], num_tokens=1)


def test_correct_warns_of_truncated_sampling_once(monkeypatch):
    monkeypatch.setattr(truncation, "_warned", set())
    with pytest.warns(TruncatedSamplingWarning, match="kept mass"):
        correct([[-1.0]], [[-1.0]], truncated_sampling=True)
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        correct([[-1.0]], [[-1.0]], truncated_sampling=True)
        correct([[-1.0]], [[-1.0]])
    assert later == []
