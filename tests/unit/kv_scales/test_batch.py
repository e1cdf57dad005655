"""The tokens that q, k and v are measured on."""

from pathlib import Path

import pytest

from rollout_service.kv_scales.batch import MAX_SEQUENCES, MAX_TOKENS, CalibrationBatch
from rollout_service.protocol.rollout import Completion, Rollout, Span

VOCAB = 128


def batch(prompts: Path | None = None, max_model_len: int = 2048) -> CalibrationBatch:
    return CalibrationBatch(prompts, VOCAB, max_model_len)


def rollout(prompt: list[int], *completions: list[int]) -> Rollout:
    """One of version 0, with these completions."""
    made = [
        Completion(
            index=index,
            token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
            finish_reason="stop",
            spans=(Span(version=0, start=0, end=len(ids)),) if ids else (),
        )
        for index, ids in enumerate(completions)
    ]
    return Rollout(request_id="r", prompt_token_ids=tuple(prompt), completions=tuple(made), replica_id="a")


def written(folder: Path, *lines: list[int]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


class TestRandomTokens:
    @pytest.mark.parametrize("max_model_len", [2, 300])
    def test_they_are_the_same_every_time(self, max_model_len):
        first, second = (batch(max_model_len=max_model_len) for _ in range(2))
        found = first.sequences()
        assert found == second.sequences() == first.sequences() and first.origin == "random tokens"
        assert [len(sequence) for sequence in found] == [min(64, max_model_len)] * MAX_SEQUENCES

    def test_they_are_of_the_whole_vocabulary_and_differ(self):
        found = batch().sequences()
        assert {token for sequence in found for token in sequence} == set(range(VOCAB))
        assert len({tuple(sequence) for sequence in found}) == MAX_SEQUENCES


class TestRollouts:
    def test_they_take_the_place_of_random_tokens(self):
        kept = batch()
        kept.add(rollout([1, 2], [3, 4], [5, 6]))
        assert kept.sequences() == [[1, 2, 3, 4]] and kept.origin == "recent rollouts"

    def test_the_newest_rollouts_are_kept_up_to_the_limit(self):
        kept = batch()
        for number in range(MAX_SEQUENCES + 2):
            kept.add(rollout([number], [10 + number]))
        assert kept.sequences() == [[number, 10 + number] for number in range(2, MAX_SEQUENCES + 2)]

    @pytest.mark.parametrize(("max_model_len", "limit"), [(5, 5), (2048, MAX_TOKENS)])
    def test_a_sequence_is_cut_at_the_limit(self, max_model_len, limit):
        kept = batch(max_model_len=max_model_len)
        kept.add(rollout([1, 2, 3], list(range(300))))
        kept.add(rollout(list(range(300)), [100]))
        assert kept.sequences() == [[1, 2, 3, *range(limit - 3)], list(range(limit))]

    def test_a_single_token_tells_nothing_and_is_left_out(self):
        kept = batch()
        kept.add(rollout([1], []))
        assert kept.origin == "random tokens"
        kept.add(rollout([1, 2], []))
        assert kept.sequences() == [[1, 2]]

    def test_what_was_given_out_does_not_change_later(self):
        kept = batch()
        kept.add(rollout([1], [2]))
        found = kept.sequences()
        kept.add(rollout([3], [4]))
        assert found == [[1, 2]]


class TestPrompts:
    def test_they_are_measured_every_time_whatever_is_rolled_out(self, tmp_path):
        given_ids = [[5, 6, 7], [VOCAB - 1, 0]]
        kept = batch(written(tmp_path, *given_ids))
        kept.add(rollout([1, 2], [3, 4]))
        assert kept.sequences() == given_ids and kept.origin == "given prompts"

    def test_the_limits_hold_for_given_prompts_too(self, tmp_path):
        path = written(tmp_path, [1] * 300, *[[5, 6, 7]] * MAX_SEQUENCES)
        assert batch(path).sequences() == [[1] * MAX_TOKENS, *[[5, 6, 7]] * (MAX_SEQUENCES - 1)]
        assert batch(path, max_model_len=2).sequences() == [[1, 1], *[[5, 6]] * (MAX_SEQUENCES - 1)]

    @pytest.mark.parametrize(
        "line",
        ["[1, 2", "", "[1, 2] [3, 4]", "7", '{"ids": [1, 2]}', "[7]", "[]", "[1, 128]", "[1, -1]", "[1, 2.0]",
         "[1, true]", '[1, "2"]', "[3, \xff]"],
    )  # fmt: skip
    def test_prompts_that_cannot_be_used_are_refused_by_line(self, tmp_path, line):
        path = tmp_path / "prompts.jsonl"
        path.write_text(f"[1, 2]\n{line}\n[3, 4]\n", encoding="latin-1")
        with pytest.raises(ValueError, match=rf"^{path}, line 2: .*each line is a JSON list of (two )?token ids"):
            batch(path)

    def test_a_file_without_prompts_says_what_to_do_instead(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no prompts: leave kv_cache\.calibration_prompts out"):
            batch(written(tmp_path))
