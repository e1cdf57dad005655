"""Two runs of the demo become one result and one plot."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.common import results
from benchmarks.common.command import spread
from benchmarks.headlines import demo_fake_quant
from benchmarks.training.demo_fake_quant import main

app = Typer()
app.command()(spread(main))


def summary(fake_quant: bool, k3: float) -> dict[str, Any]:
    return {
        "steps": 2,
        "fp8_kv_cache": False,
        "fake_quant": fake_quant,
        "reward_first": 0.25,
        "reward_last": 1.0,
        "k3_mean": k3,
        "by_step": {"step": [1, 2], "reward": [0.25, 1.0], "mismatch_k3": [2 * k3, 0.0]},
    }


def test_both_are_kept_and_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    runs = {"plain": summary(False, 2e-4), "fake_quant": summary(True, 8e-8)}
    for name, found in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    asked = ["--plain", f"{tmp_path}/plain.json", "--fake-quant", f"{tmp_path}/fake_quant.json"]
    run = CliRunner().invoke(app, [*asked, "--picture", f"{tmp_path}/plot.png"], catch_exceptions=False)
    assert run.exit_code == 0 and (tmp_path / "plot.png").stat().st_size > 0
    kept = json.loads(results.path("training_demo_fake_quant").read_text())
    assert kept["runs"] == runs
    assert demo_fake_quant(kept) == "reward 0.25 → 1.00 under fake_quant, mean k3 8.0e-08 instead of 2.0e-04"
    asked[1], asked[3] = asked[3], asked[1]
    assert CliRunner().invoke(app, asked).exit_code == 2
