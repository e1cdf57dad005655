"""A completion in two pieces becomes one, as if it had been made in one go."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollout_service.config.engine import EngineConfig
from rollout_service.fleet.continuation import (
    Decode,
    StopSearch,
    continuation_call,
    cut_at_stop,
    fill_from_others,
    merge_completions,
    of_version,
    slice_completion,
    why_restart,
    without_tokens,
)
from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import LARGEST_SEED, GenerateCall, Sampling, Scoring
from rollout_service.protocol.sampling_mask import pack, unpack
from tests.unit.fleet.completions import completion_of as piece


def call(**sampling: object) -> GenerateCall:
    return GenerateCall(
        request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(**sampling), min_weight_version=3, priority=4
    )


CALL = call()


def test_a_continuation_keeps_the_adapters_version():
    asked = CALL.model_copy(update={"adapter": WantedAdapter(name="a", min_version=1)})
    assert continuation_call(asked, without_tokens(piece((6,), (4, 1))), 2).adapter == asked.adapter
    rest = continuation_call(asked, piece((6,), (4, 1)).with_adapter("a", 3), 2)
    assert rest.adapter == WantedAdapter(name="a", exact_version=3)


def test_pieces_join_with_logprobs_and_the_end_of_the_second():
    rest = piece((8, 9), (5, 2), end="stop").model_copy(update={"stop_reason": 9})
    whole = merge_completions(CALL, piece((6, 7), (4, 2), index=2), rest)
    assert (whole.index, whole.token_ids) == (2, (6, 7, 8, 9))
    assert whole.logprobs == pytest.approx((-0.6, -0.7, -0.8, -0.9))
    assert (whole.finish_reason, whole.stop_reason) == ("stop", 9)
    assert whole.spans == (Span(version=4, start=0, end=2), Span(version=5, start=2, end=4))


def test_the_remainder_continues_the_tokens_in_the_length_left():
    rest = continuation_call(
        call(n=4, max_tokens=10, min_tokens=5, stop_token_ids=(9,)), piece((6, 7, 8), (3, 3), index=2), 2
    )
    assert rest.prompt_token_ids == (1, 2, 6, 7, 8)
    assert (rest.sampling.n, rest.sampling.max_tokens, rest.sampling.min_tokens) == (1, 7, 2)
    assert (rest.sampling.stop_token_ids, rest.min_weight_version, rest.priority) == ((9,), 3, 4)
    assert (rest.request_id, rest.partial_tokens) == ("r-2-2", 3)
    assert rest.sampling.routed_experts_prompt_start is None
    late = continuation_call(rest, piece((9, 9, 9), (3, 3)), 3)
    assert (late.partial_tokens, late.sampling.min_tokens) == (6, 0)


@pytest.mark.parametrize(("asked", "spans", "wanted"), [
    (None, ((4, 1), (5, 2)), 5), (3, ((4, 1), (5, 2)), 5), (7, ((4, 1), (5, 2)), 7), (7, (), 7), (None, (), None),
])  # fmt: skip
def test_the_rest_is_of_weights_no_older_than_its_beginning(asked, spans, wanted):
    partial = piece((6, 7, 8)[: sum(length for _, length in spans)], *spans)
    asking = CALL.model_copy(update={"min_weight_version": asked})
    assert continuation_call(asking, partial, 2).min_weight_version == wanted


@pytest.mark.parametrize(("spans", "kept"), [(((4, 2), (5, 1)), 2), (((4, 1), (5, 1), (4, 1)), 1), (((5, 3),), 0)])
def test_completion_ends_before_tokens_of_another_version(spans, kept):
    prompt_logprobs = (None, (Candidate(2, -0.1, 1),))
    whole = piece((6, 7, 8), *spans, end="stop").model_copy(
        update={"stop_reason": 8, "prompt_logprobs": prompt_logprobs}
    )
    cut = of_version(whole, 4)
    assert cut.token_ids == (6, 7, 8)[:kept] and cut.versions == (4,) * bool(kept)
    assert (cut.finish_reason, cut.stop_reason) == ("abort", None)
    assert cut.prompt_logprobs == (prompt_logprobs if kept else None)
    of_one_version = piece((6, 7), (4, 2), end="stop")
    assert of_version(of_one_version, 4) is of_one_version


def test_scores_are_of_the_prompt_and_not_of_the_first_tokens():
    """vLLM refuses target tokens unless each token of its prompt but the first has a row."""
    asking = CALL.model_copy(update={"scoring": Scoring(start=1, target_token_ids=((2, 5),))})
    lost, scores = piece((6, 7), (4, 2)), CompactLogprobs.of([2, 5], [-1.0, -2.0], [0, 2], 0)
    rest = continuation_call(asking, lost, 2)
    assert rest.prompt_token_ids == (1, 2, 6, 7)
    assert rest.scoring == Scoring(start=1, target_token_ids=((2, 5), (), ()))
    made = piece((8,), (4, 1), end="stop").model_copy(
        update={"scores": CompactLogprobs.of([2, 5], [-1.0, -2.0], [0, 2, 2, 2], 0)}
    )
    assert merge_completions(asking, lost, made).scores == scores
    scored = lost.model_copy(update={"scores": scores})
    assert continuation_call(asking, scored, 2).scoring is None
    assert merge_completions(asking, scored, piece((8,), (4, 1), end="stop")).scores == scores


def test_a_seeded_remainder_has_a_new_and_reproducible_seed():
    def seed(index: int, done: int) -> int | None:
        return continuation_call(call(n=4, seed=7), piece((5,) * done, *[(3, 1)] * done, index=index), 2).sampling.seed

    assert [seed(index, 0) for index in range(4)] == [7, 8, 9, 10]
    later = {seed(index, done) for index in range(4) for done in (1, 2, 3)}
    assert len(later) == 12 and not later & {7, 8, 9, 10}
    assert seed(1, 2) == seed(1, 2)
    rests = [continuation_call(call(n=2, seed=-7), piece((5,), (3, 1), index=i), 2).sampling.seed for i in range(2)]
    assert None not in rests and len(set(rests)) == 2
    assert continuation_call(call(), piece((5,), (3, 1)), 2).sampling.seed is None


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (-1, 3), (-4, 3)])
@pytest.mark.parametrize("done", [0, 2])
def test_a_seed_that_is_none_for_vllm_is_none_for_the_rest(seed, index, done):
    partial = piece((5,) * done, *[(3, 1)] * done, index=index)
    assert continuation_call(call(n=4, seed=seed), partial, 2).sampling.seed is None


def test_the_largest_seed_has_successors():
    rest = continuation_call(call(n=2, seed=LARGEST_SEED), piece((), index=1), 2)
    assert rest.sampling.seed == LARGEST_SEED + 1 < 2**63


PENALTIES = [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_penalties_go_on_where_the_engines_count_what_was_made_before(penalty):
    assert why_restart(Sampling(**penalty), EngineConfig()) is None
    masks = why_restart(Sampling(**penalty), EngineConfig(return_sampling_mask=True))
    assert masks is not None and "engine.return_sampling_mask" in masks
    speculation = {"speculative_config": {"method": "ngram"}}
    assert "speculation" in str(why_restart(Sampling(**penalty), EngineConfig(extra=speculation)))


def test_structured_outputs_start_anew():
    structured = Sampling(structured_outputs={"json_object": True})
    assert "structured_outputs" in str(why_restart(structured, EngineConfig()))
    plain = Sampling(repetition_penalty=1.2, stop_token_ids=(3,), stop=("x",))
    assert why_restart(plain, EngineConfig(return_sampling_mask=True)) is None
    anew = without_tokens(piece((6, 7), (3, 2), index=1))
    assert (anew.index, anew.token_ids, anew.logprobs, anew.spans) == (1, (), (), ())


def masked(completion: Completion, *chunks: str) -> Completion:
    return completion.model_copy(update={"packed_sampling_mask": chunks})


def test_likeliest_tokens_of_both_pieces_follow_one_another():
    def likely(tokens: tuple[int, ...]) -> Completion:
        return piece(tokens, (4, len(tokens))).model_copy(
            update={"top_logprobs": tuple((Candidate(token, -0.5, 1),) for token in tokens)}
        )

    of_the_prompt = (None, (Candidate(2, -1.0, 1),))
    first = likely((6, 7)).model_copy(update={"prompt_logprobs": of_the_prompt})
    whole = merge_completions(CALL, first, likely((8,)))
    assert [candidate.token_id for (candidate,) in whole.top_logprobs or ()] == [6, 7, 8]
    assert whole.prompt_logprobs == of_the_prompt
    # the rest is asked for nothing of the prompt, which by then has the first tokens in it
    assert continuation_call(call(prompt_logprobs=1, logprobs=1), first, 2).sampling == Sampling(n=1, logprobs=1)
    anew = without_tokens(first)
    assert anew.top_logprobs is None and merge_completions(CALL, anew, likely((9,))).top_logprobs == (
        (Candidate(9, -0.5, 1),),
    )


def test_sampling_masks_of_both_pieces_come_one_after_the_other():
    first, second = piece((6, 7), (3, 2)), piece((8,), (3, 1))
    assert merge_completions(CALL, masked(first, "a"), masked(second, "b")).packed_sampling_mask == ("a", "b")
    assert merge_completions(CALL, piece(()), masked(second, "b")).packed_sampling_mask == ("b",)
    assert merge_completions(CALL, masked(first, "a"), piece(())).packed_sampling_mask == ("a",)
    without = merge_completions(CALL, first, second)
    assert without.packed_sampling_mask is None and without.routed_experts is None
    anew = without_tokens(masked(first, "a"))
    assert merge_completions(CALL, anew, masked(second, "b")).packed_sampling_mask == ("b",)


def routed(completion: Completion, start: int, *rows: int) -> Completion:
    """With ``rows`` of one layer and two experts each, the first of them that of token ``start``."""
    experts = np.array([[[row, row + 1]] for row in rows], np.uint8).reshape(-1, 1, 2)
    return completion.model_copy(update={"routed_experts": RoutedExperts.of(experts, start)})


def known(completion: Completion) -> dict[int, int]:
    """The first expert of each token whose experts are known, of a prompt of two tokens."""
    assert completion.routed_experts is not None
    experts, told = completion.routed_experts.unpacked(2 + len(completion.token_ids))
    return {int(token): int(experts[token, 0, 0]) for token in told.nonzero()[0]}


class TestRoutedExperts:
    """Token i of the whole sequence, prompt (1, 2) first, has the row 10 + i."""

    asking = call(routed_experts_prompt_start=0)
    partial = routed(piece((6, 7), (3, 2)), 0, 10, 11, 12)

    def test_the_rest_begins_with_the_last_token_that_has_no_row(self):
        rest = continuation_call(self.asking, self.partial, 2)
        assert rest.sampling.routed_experts_prompt_start == 3 == len(rest.prompt_token_ids) - 1
        whole = merge_completions(self.asking, self.partial, routed(piece((8, 9), (4, 2), end="stop"), 3, 13, 14))
        assert known(whole) == {0: 10, 1: 11, 2: 12, 3: 13, 4: 14}

    def test_three_pieces_join_too_and_one_without_tokens_adds_nothing(self):
        second = merge_completions(self.asking, self.partial, routed(piece((8,), (4, 1)), 3, 13))
        assert merge_completions(self.asking, second, piece(())) == second
        third = merge_completions(self.asking, second, routed(piece((9,), (5, 1), end="stop"), 4, 14))
        assert known(third) == {0: 10, 1: 11, 2: 12, 3: 13, 4: 14}

    def test_a_start_of_the_callers_own_holds_for_all_pieces(self):
        late = call(routed_experts_prompt_start=2)
        first = routed(piece((6,), (3, 1)), 2)
        assert continuation_call(late, piece(()), 2).sampling.routed_experts_prompt_start == 2
        assert continuation_call(late, first, 2).sampling.routed_experts_prompt_start == 2
        assert known(merge_completions(late, first, routed(piece((7, 8), (3, 2)), 2, 12, 13))) == {2: 12, 3: 13}

    def test_tokens_that_came_without_theirs_are_missing(self):
        """As those of a replica that died. The next one reads their last token first, and the prompt as well: what the
        prompt's last token went to there is not what the first of them was sampled with."""
        lost = piece((6, 7, 8), (3, 3))
        assert continuation_call(self.asking, lost, 2).sampling.routed_experts_prompt_start == 0
        whole = merge_completions(self.asking, lost, routed(piece((9,), (3, 1), end="stop"), 0, 10, 11, 12, 13, 14))
        assert whole.routed_experts is not None and whole.routed_experts.missing == ((1, 4),)
        assert known(whole) == {0: 10, 4: 14}

    def test_a_rest_without_its_own_leaves_the_first_ones(self):
        whole = merge_completions(self.asking, self.partial, piece((8, 9), (4, 2), end="stop"))
        assert known(whole) == {0: 10, 1: 11, 2: 12}
        again = merge_completions(self.asking, whole, routed(piece((5,), (4, 1)), 5, 15))
        assert known(again) == {0: 10, 1: 11, 2: 12, 5: 15}

    @pytest.mark.parametrize(("start", "of_the_prompt"), [(0, {0: 10}), (1, {}), (2, {})])
    def test_completions_that_ended_without_theirs_have_those_of_the_prompt(self, start, of_the_prompt):
        """Another completion has them: its replica was lost too, and the next one has read the prompt."""
        ended, cut = piece((6, 7, 8), (3, 3), end="stop"), piece((6,), (3, 1))
        whole = routed(piece((6, 9), (3, 2), index=1, end="stop"), start, *range(10 + start, 13))
        filled, unchanged, donor = fill_from_others(self.asking, (ended, cut, whole))
        assert (unchanged, donor) == (cut, whole) and filled.token_ids == ended.token_ids
        assert filled.routed_experts is not None and filled.routed_experts.end == 4  # the last token has no row
        assert known(filled) == of_the_prompt

    def test_what_starts_anew_forgets_them(self):
        anew = without_tokens(self.partial)
        assert anew.routed_experts is None
        assert known(merge_completions(self.asking, anew, routed(piece((9,), (4, 1)), 0, 10, 11))) == {0: 10, 1: 11}


def test_what_a_lost_replica_told_has_no_logprobs_of_the_prompt_so_the_rest_is_asked_for_them():
    told = piece((6, 7), (4, 2))
    assert continuation_call(call(prompt_logprobs=1), told, 2).sampling.prompt_logprobs == 1
    of_the_prompt, of_the_first_tokens = (None, (Candidate(2, -1.0, 1),)), ((Candidate(6, -1.0, 1),),) * 2
    rest = piece((8,), (4, 1)).model_copy(update={"prompt_logprobs": of_the_prompt + of_the_first_tokens})
    assert merge_completions(call(prompt_logprobs=1), told, rest).prompt_logprobs == of_the_prompt


def test_a_part_has_the_logprobs_spans_and_masks_of_its_tokens():
    whole = masked(piece((5, 6, 7, 8), (3, 2), (4, 2)), pack([[1], [2, 3], [4], [5]]))
    middle = slice_completion(whole, 1, 3)
    assert middle.token_ids == (6, 7) and middle.logprobs == pytest.approx((-0.6, -0.7))
    assert [(s.version, s.start, s.end) for s in middle.spans] == [(3, 0, 1), (4, 1, 2)]
    counts, ids = unpack(middle.packed_sampling_mask or ())
    assert (counts.tolist(), ids.tolist()) == ([2, 1], [2, 3, 4])
    nothing = slice_completion(whole, 4, 4)
    assert (nothing.token_ids, nothing.spans, nothing.packed_sampling_mask) == ((), (), ())


TEXT_OF = {1: "a", 2: "b", 3: "END", 4: "E", 5: "ND", 6: "", 7: "ENDx"}


def ended(asking: GenerateCall, whole: Completion, seam: int, decode: Decode) -> Completion:
    search = StopSearch(asking, whole.token_ids[:seam], decode)
    found = search.end_in(whole.token_ids[seam:])
    return whole if found is None else cut_at_stop(asking, whole, seam + found[0], found[1])


class TestStopStringsAcrossASeam:
    def test_the_experts_of_what_comes_after_it_are_left_out(self):
        asking = call(stop=("END",), routed_experts_prompt_start=0)
        whole = routed(piece((1, 4, 5, 2), (3, 4), end="length"), 0, 10, 11, 12, 13, 14)
        cut = ended(asking, whole, 2, lambda tokens, _: "".join(TEXT_OF[token] for token in tokens))
        assert cut.token_ids == (1, 4, 5) and known(cut) == {0: 10, 1: 11, 2: 12, 3: 13}

    def test_each_token_is_decoded_with_a_few_others_whatever_its_length(self):
        lengths = []

        def decode(tokens: Sequence[int], _: bool) -> str:
            lengths.append(len(tokens))
            return "a" * len(tokens)

        search = StopSearch(call(stop=("a" * 999 + "b",)), (1,) * 9000, decode)
        assert [search.end_in((1,)) for _ in range(1200)] == [None] * 1200
        assert search.is_over
        *each, once = sorted(lengths)
        assert once == 4096 + 8 and max(each) < 20 and len(each) < 2 * 1000 + 10
