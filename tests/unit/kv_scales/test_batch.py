"""The tokens that q, k and v are measured on."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.protocol.rollout import Completion, Rollout, Span

VOCAB = 128


def batch(prompts: Path | None = None, max_model_len: int = 2048, **limits: int) -> CalibrationBatch:
    return CalibrationBatch(KVCalibrationConfig(prompts=prompts, **limits), VOCAB, max_model_len)


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
    @given(sequences=st.integers(1, 20), tokens=st.integers(2, 300), max_model_len=st.integers(2, 300))
    def test_they_are_the_same_every_time(self, sequences: int, tokens: int, max_model_len: int) -> None:
        first, second = (
            batch(max_sequences=sequences, max_sequence_tokens=tokens, max_model_len=max_model_len) for _ in range(2)
        )
        found = first.sequences()
        assert found == second.sequences() == first.sequences() and first.origin == "random tokens"
        assert [len(sequence) for sequence in found] == [min(64, tokens, max_model_len)] * sequences
        assert all(0 <= token < VOCAB for sequence in found for token in sequence)

    def test_they_are_of_the_whole_vocabulary_and_differ(self) -> None:
        found = batch(max_sequences=64).sequences()
        assert {token for sequence in found for token in sequence} == set(range(VOCAB))
        assert len({tuple(sequence) for sequence in found}) == 64


class TestRollouts:
    def test_they_take_the_place_of_random_tokens(self) -> None:
        kept = batch()
        kept.add(rollout([1, 2], [3, 4], [5, 6]))
        assert kept.sequences() == [[1, 2, 3, 4]] and kept.origin == "recent rollouts"

    def test_the_newest_rollouts_are_kept_up_to_the_limit(self) -> None:
        kept = batch(max_sequences=3)
        for number in range(5):
            kept.add(rollout([number], [10 + number]))
        assert kept.sequences() == [[2, 12], [3, 13], [4, 14]]

    @pytest.mark.parametrize(("tokens", "max_model_len"), [(5, 2048), (256, 5)], ids=["configured", "of the engine"])
    def test_a_sequence_is_cut_at_the_limit(self, tokens: int, max_model_len: int) -> None:
        kept = batch(max_sequence_tokens=tokens, max_model_len=max_model_len)
        kept.add(rollout([1, 2, 3], [4, 5, 6, 7]))
        kept.add(rollout(list(range(9)), [100]))
        assert kept.sequences() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]

    def test_a_single_token_tells_nothing_and_is_left_out(self) -> None:
        kept = batch()
        kept.add(rollout([1], []))
        assert kept.origin == "random tokens"
        kept.add(rollout([1, 2], []))
        assert kept.sequences() == [[1, 2]]

    def test_what_was_given_out_does_not_change_later(self) -> None:
        kept = batch()
        kept.add(rollout([1], [2]))
        found = kept.sequences()
        kept.add(rollout([3], [4]))
        assert found == [[1, 2]]


class TestPrompts:
    def test_they_are_measured_every_time_whatever_is_rolled_out(self, tmp_path: Path) -> None:
        given_ids = [[5, 6, 7], [VOCAB - 1, 0]]
        kept = batch(written(tmp_path, *given_ids))
        kept.add(rollout([1, 2], [3, 4]))
        assert kept.sequences() == given_ids and kept.origin == "given prompts"

    def test_the_limits_hold_for_given_prompts_too(self, tmp_path: Path) -> None:
        path = written(tmp_path, [1, 2, 3, 4], [5, 6], [7, 8])
        assert batch(path, max_sequences=2, max_sequence_tokens=3).sequences() == [[1, 2, 3], [5, 6]]
        assert batch(path, max_model_len=2).sequences() == [[1, 2], [5, 6], [7, 8]]

    @pytest.mark.parametrize(
        "line",
        ["[1, 2", "", "[1, 2] [3, 4]", "7", '{"ids": [1, 2]}', "[7]", "[]", "[1, 128]", "[1, -1]", "[1, 2.0]",
         "[1, true]", '[1, "2"]', "[3, \xff]"],
    )  # fmt: skip
    def test_prompts_that_cannot_be_used_are_refused_by_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(f"[1, 2]\n{line}\n[3, 4]\n", encoding="latin-1")
        with pytest.raises(ValueError, match=rf"^{path}, line 2: .*each line is a JSON list of (two )?token ids"):
            batch(path)

    def test_a_file_without_prompts_says_what_to_do_instead(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no prompts: leave kv_cache\.calibration\.prompts out"):
            batch(written(tmp_path))
