"""Curves of several seeds become bands, means and differences."""

import math

import pytest

from benchmarks.training.ablation_report import Run, bands, columns, differences, markdown, spread, summarize


def run(arm: str, seed: int, reward: list[float], accuracy: float = 0.9) -> Run:
    flat = {"k3": 0.01, "ess": 0.98, "clipped": 0.002, "suspect": 0.0}
    curves = {"reward": reward} | {name: [value] * len(reward) for name, value in flat.items()}
    return Run(arm, seed, {}, curves, accuracy, accuracy - 0.1, 10.0)


RUNS = [
    run("fp8_tis", 0, [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.8], 0.9),
    run("fp8_tis", 1, [0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.4], 0.7),
    run("fp8", 0, [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.7], 0.6),
]


def test_the_final_reward_is_that_of_the_last_five_steps() -> None:
    found = columns(RUNS[0])
    assert found["final_reward"] == pytest.approx((4 * 0.6 + 0.8) / 5)
    assert found["reward_area"] == pytest.approx(3.8 / 7)
    assert (found["trainer_accuracy"], found["service_accuracy"]) == pytest.approx((0.9, 0.8))


def test_spread_is_that_of_a_sample() -> None:
    assert spread([1.0, 3.0]) == pytest.approx({"mean": 2.0, "sd": math.sqrt(2)})
    assert spread([1.0]) == {"mean": 1.0, "sd": 0.0}


def test_a_summary_has_each_arm_s_mean_over_its_own_seeds() -> None:
    summary = summarize(RUNS)
    assert list(summary) == ["fp8_tis", "fp8"]
    assert summary["fp8_tis"]["trainer_accuracy"]["mean"] == pytest.approx(0.8)
    assert summary["fp8"]["final_reward"]["mean"] == pytest.approx((4 * 0.6 + 0.7) / 5)


def test_a_band_goes_from_the_lowest_to_the_highest_seed() -> None:
    mean, low, high = bands(RUNS[:2], "reward")
    assert mean == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6])
    assert low == pytest.approx([0.2, 0.4, 0.4, 0.6, 0.6, 0.6, 0.4])
    assert high == pytest.approx([0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.8])
    with pytest.raises(ValueError, match="shorter"):
        bands([RUNS[0], run("fp8_tis", 2, [0.1])], "reward")


def test_differences_are_of_seeds_that_both_arms_have() -> None:
    found = differences(RUNS)
    assert list(found) == ["fp8_tis − fp8"]
    assert found["fp8_tis − fp8"]["trainer_accuracy"] == pytest.approx([0.3])
    assert found["fp8_tis − fp8"]["final_reward"] == pytest.approx([0.02])


def test_the_table_says_what_was_measured() -> None:
    lines = markdown(RUNS, {"fp8_tis": "FP8, TIS", "fp8": "FP8"}).splitlines()
    assert lines[2] == (
        "| FP8, TIS | 0.580 ± 0.085 | 0.514 ± 0.040 | 0.800 ± 0.141 | 0.700 ± 0.141 | 0.01 ± 0 | 0.9800 | 0.20% | 0% |"
    )
    assert lines[-1] == "| FP8 | +0.020 | +0.014 | +0.300 | +0.300 |"
