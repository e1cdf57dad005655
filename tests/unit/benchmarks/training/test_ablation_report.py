"""Runs on disk, and the means and differences of several seeds."""

from pathlib import Path

import pytest

from benchmarks.training.ablation_report import (
    Run,
    RunFile,
    differences,
    load_run,
    run_file,
)
from tests.support.ablation import END, STEP


def run(arm: str, seed: int, reward: list[float], accuracy: float = 0.9) -> Run:
    curves = {name: [value] * len(reward) for name, value in STEP.items()} | {"reward": reward}
    end = END | {"trainer_accuracy": accuracy, "service_accuracy": accuracy - 0.1}
    return Run(arm, seed, {}, {}, curves, end)


RUNS = [
    run("fp8_tis", 0, [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.8], 0.9),
    run("fp8_tis", 1, [0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.4], 0.7),
    run("fp8", 0, [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.7], 0.6),
]


def test_a_run_is_read_as_far_as_it_was_written(tmp_path: Path) -> None:
    begun = Run("fp8", 2, {"steps": 2}, {"machine": "here"})
    path = run_file(tmp_path, "fp8", 2)
    assert load_run(path) is None
    with RunFile(tmp_path, begun) as file:
        assert load_run(path) == begun
        file.write(STEP)
        file.write(STEP)
        with path.open("a") as torn:
            torn.write('{"reward": 0.')
        found = load_run(path)
        assert found is not None and (found.steps, found.ended) == (2, False)
        assert found.curves["tokens"] == [400.0, 400.0]
    path.write_text(path.read_text().removesuffix('{"reward": 0.'))
    with path.open("a") as file:
        file.write('{"ended": "all steps", "service_accuracy": 0.8}\n')
    found = load_run(path)
    assert found is not None and (found.steps, found.end["service_accuracy"]) == (2, 0.8)


def test_differences_are_of_seeds_that_both_arms_have() -> None:
    found = differences(RUNS)
    assert list(found) == ["fp8_tis − fp8"]
    assert found["fp8_tis − fp8"]["trainer_accuracy"] == pytest.approx([0.3])
    assert found["fp8_tis − fp8"]["final_reward"] == pytest.approx([0.02])
