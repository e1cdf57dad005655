"""The report of the ablation's arms whose rollouts run over updates."""

from pathlib import Path

import pytest

from benchmarks import index
from benchmarks.common import results
from benchmarks.training import kv_cache_report, tis_ablation
from benchmarks.training.ablation_report import Run
from benchmarks.training.tis_ablation import AblationOptions, report

STEP = {"reward": 0.25, "k3": 0.5, "probability_error": 0.5, "ess": 1.0, "clipped": 0.0, "tokens": 6.0}
STEP |= {"cut_off": 0.0, "grad_norm": 1.0, "suspect": 0.0, "step_s": 3.0}
SETTINGS = {"prompts": 4, "completions": 2, "steps": 2, "ahead": 4}
MARKS = f"<!-- made by {kv_cache_report.PART} -->\n", f"<!-- end of {kv_cache_report.PART} -->"


def ages(*rows: tuple[float, float]) -> dict[str, object]:
    """Return the end of a run with these thousands of tokens and k3 by age, and with k3 0.5 of age 0."""
    fresh = {"k3_of_age_0": 0.5, "prob_error_of_age_0": 1.5}
    kv_ages = [
        {"age": age, "tokens": 1000 * n, "k3": k3, "prob_error": 1 + k3} | fresh for age, (n, k3) in enumerate(rows)
    ]
    return {"trainer_accuracy": 0.5, "service_accuracy": 0.5, "ended": "all steps were made", "kv_ages": kv_ages}


def write_run(folder: Path, task: str, arm: str, seed: int, end: dict[str, object]) -> None:
    run = Run(arm, seed, SETTINGS | {"task": task}, {"machine": f"{task}-machine"}, end=end)
    for _ in range(2):
        run.add(STEP)
    run.save(folder / "runs")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page, kept = tmp_path / "page.md", tmp_path / "results"
    page.write_text("before\n" + "".join(MARKS) + "\nafter\n")
    monkeypatch.setattr(kv_cache_report, "PAGE", page)
    monkeypatch.setattr(kv_cache_report, "FIGURE", tmp_path / "kv_cache.png")
    for module in (kv_cache_report, results):
        monkeypatch.setattr(module, "RESULTS", kept)
    monkeypatch.setattr(tis_ablation, "PAGE", tmp_path / "no page")
    return page


def test_overlapped_runs_are_published_apart(page, tmp_path):
    for seed, (tokens, k3) in enumerate([(30, 0.25), (10, 0.125)]):
        write_run(tmp_path / "digits", "digits", "fp8_drop", seed, ages((100, 0.5)))
        write_run(tmp_path / "digits", "digits", "fp8_keep1", seed, ages((50, 0.5), (tokens, k3)))
    write_run(tmp_path / "addition", "addition", "fp8_keep4", 0, ages((50, 0.5), (5, 0.75), (5, 2.0), (0.9, 3.0)))
    for task in ("addition", "digits"):
        report(AblationOptions(task=task, out=tmp_path / task, report=True, publish=True), lambda text: None)

    text = page.read_text()
    assert text.startswith("before\n" + MARKS[0]) and text.endswith(MARKS[1] + "\nafter\n")
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    heading, _, *rows = lines
    speed = heading.index("tokens/s")
    assert [row[:2] for row in rows] == [
        ["digits", "dropped"],
        ["digits", "kept, age ≤ 1"],
        ["addition", "kept, age ≤ 4"],
    ]
    assert [row[speed] for row in rows] == ["16"] * 3  # 8 completions of 6 tokens in 3 s
    first = heading.index("tokens of age ≥ 1")
    assert heading[first:] == ["tokens of age ≥ 1", "k3 of age 0", "1 ÷ 0", "2 ÷ 0"]
    assert rows[0][first:] == ["0%", "0.5", "", ""]
    assert rows[1][first:] == ["29%", "0.5", "0.44", ""]  # k3: (30 × 0.25 + 10 × 0.125) ÷ 40 ÷ 0.5
    assert rows[2][first:] == ["17%", "0.5", "1.50", "4.00"]  # too few tokens have age 3
    names = sorted(file.relative_to(tmp_path / "results").as_posix() for file in (tmp_path / "results").rglob("*.json"))
    assert names == ["addition-machine/training_kv_cache_addition.json", "digits-machine/training_kv_cache.json"]
    assert not list(index.problems(index.README.read_text(), tmp_path / "results"))
    assert (tmp_path / "kv_cache.png").stat().st_size > 10_000
