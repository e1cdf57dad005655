"""The ablation, with a service of its own; no other test runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training.ablation_report import load_run, run_file

PROJECT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_every_version_of_coarse_weights_is_served_and_suspect(tmp_path):
    options = ["--arms", "coarse_tis", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks.training.tis_ablation", *options], cwd=PROJECT, check=True)
    run = load_run(run_file(tmp_path / "runs", "coarse_tis", 0))
    assert run is not None and run.ended and len(run.curves["k3"]) == 2 and min(run.curves["k3"]) > 0.01
    assert run.curves["suspect"] == [1.0, 1.0]
    assert (tmp_path / "table.md").is_file() and (tmp_path / "tis_ablation.png").is_file()
