"""The demo's figures become a result as they are."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.common import results
from benchmarks.common.command import spread
from benchmarks.training.demo import main

app = Typer()
app.command()(spread(main))


def test_a_summary_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    summary = {"reward_first": 0.25, "versions": 41}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = CliRunner().invoke(app, ["--summary", str(tmp_path / "summary.json")], catch_exceptions=False)
    assert run.exit_code == 0
    assert json.loads(results.path("training_demo").read_text())["summary"] == summary


def test_without_a_demo_there_is_nothing_to_keep(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["--summary", str(tmp_path / "summary.json")])
    assert run.exit_code == 2
    assert "does not exist" in " ".join(run.output.replace("│", " ").split())
