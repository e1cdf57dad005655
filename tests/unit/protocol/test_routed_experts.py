"""Routed experts on the wire."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.routed_experts import RoutedExperts


def rows(tokens: int, layers: int = 2, topk: int = 3, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    most = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, most, (tokens, layers, topk), dtype, endpoint=True)


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from([np.uint8, np.uint16]))
def test_what_is_packed_comes_back(tokens, layers, topk, dtype):
    held = rows(tokens, layers, topk, dtype)
    sent = RoutedExperts.model_validate_json(RoutedExperts.of(held, 3).model_dump_json())
    assert (sent.shape, sent.end) == (held.shape, 3 + tokens)
    assert sent.rows().dtype == dtype and (sent.rows() == held).all()


def test_other_languages_find_little_endian_numbers_row_by_row():
    sent = RoutedExperts.of(np.array([[[258, 3]]], np.uint16), 0)
    assert base64.b64decode(sent.data) == bytes([2, 1, 3, 0])
    # as renderers 0.1.12 finds them in the bytes of a reply
    assert sent.model_dump_json().startswith('{"data":"AgEDAA==","shape":[1,1,2],"start":0,"dtype":"uint16"')


def test_they_lie_at_their_tokens_and_the_last_one_is_not_known():
    held = rows(4)
    experts, known = RoutedExperts.of(held, 2).unpacked(7)
    assert experts.shape == (7, 2, 3) and experts.dtype == np.uint8
    assert known.tolist() == [False, False, True, True, True, True, False]
    assert (experts[2:6] == held).all() and not experts[~known].any()
    with pytest.raises(ValueError, match=r"tokens \[2, 6\) of a sequence of 5"):
        RoutedExperts.of(held, 2).unpacked(5)


def test_what_lies_between_two_pieces_is_missing():
    first, second = rows(2), rows(3, seed=1)
    whole = RoutedExperts.of(first, 1).followed_by(RoutedExperts.of(second, 5, missing=((6, 7),)))
    assert (whole.start, whole.end, whole.missing) == (1, 8, ((3, 5), (6, 7)))
    experts, known = whole.unpacked(8)
    assert known.tolist() == [False, True, True, False, False, True, False, True]
    assert (experts[1:3] == first).all() and (experts[5:] == second).all()


@pytest.mark.parametrize("second", [RoutedExperts.of(rows(1), 2), RoutedExperts.of(rows(1, topk=2), 3)])
def test_pieces_that_overlap_or_are_of_another_model_do_not_join(second):
    with pytest.raises(ValueError, match="do not follow"):
        RoutedExperts.of(rows(2), 1).followed_by(second)


def test_rows_that_are_taken_out_are_zeros_within_what_there_is():
    held = RoutedExperts.of(rows(4), 2)
    cut = held.without(0, 4)
    assert cut.missing == ((2, 4),) and not cut.rows()[:2].any() and (cut.rows()[2:] == held.rows()[2:]).all()
    assert held.without(6, 9) is held


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data": "AAA="}, "characters of base64 are not the 6 bytes"),
        ({"missing": [[0, 2]]}, r"do not lie in \[1, 2\)"),
        ({"missing": [[1, 1]]}, "do not lie in"),
        ({"shape": [1, 0, 3]}, "greater than 0"),
        ({"dtype": "int32"}, "uint8"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(changed, says):
    with pytest.raises(ValidationError, match=says):
        RoutedExperts.model_validate({**RoutedExperts.of(rows(1), 1).model_dump(), **changed})


def test_what_is_no_base64_is_refused_when_it_is_read():
    with pytest.raises(ValueError, match="no base64"):
        RoutedExperts(data="*" * 8, shape=(1, 2, 3), start=0, dtype="uint8").rows()


def test_a_rollout_gives_them_for_prompt_and_completion():
    made = Completion(
        index=0,
        token_ids=(7, 8),
        logprobs=(-1.0, -1.0),
        finish_reason="length",
        spans=(Span(version=1, start=0, end=2),),
        routed_experts=RoutedExperts.of(rows(3), 1),
    )
    without = made.model_copy(update={"index": 1, "routed_experts": None})
    rollout = Rollout(request_id="r", prompt_token_ids=(4, 5, 6), completions=(made, without), replica_id="a")
    experts, known = rollout.routed_experts()
    assert experts.shape == (5, 2, 3) and known.tolist() == [False, True, True, True, False]
    with pytest.raises(ValueError, match="completion 1 of r came without its experts"):
        rollout.routed_experts(1)
