"""``make serve`` runs the deployment for the stack that is installed, or says why it does not."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With a command ``serve`` that only says what it was called with."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts/serve.sh", tmp_path / "scripts")
    _command(tmp_path, "serve", 'echo "called: serve $*"')
    return tmp_path


def _command(clone: Path, name: str, does: str) -> None:
    file = clone / ".venv/bin" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)


def served(clone: Path, stack: str, doctor: str = "exit 0") -> "subprocess.CompletedProcess[str]":
    (clone / ".venv/setup.stamp").write_text(f"{stack} {clone}\ndigest\n")
    _command(clone, "rollout-service", f'echo "called: rollout-service $*"\n{doctor}')
    return subprocess.run([clone / "scripts/serve.sh"], capture_output=True, text=True, check=False)


def test_the_cpu_stack_serves_on_the_cpu(clone):
    ended = served(clone, "cpu")
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-1] == "called: serve run deployments/cpu_rollout.yaml"


def test_the_gpu_stack_serves_on_gpus_once_the_doctor_agrees(clone):
    called = [line for line in served(clone, "gpu").stdout.splitlines() if line.startswith("called")]
    deployment = "deployments/fp8_rollout.yaml"
    assert called == [f"called: rollout-service doctor {deployment}", f"called: serve run {deployment}"]


def test_gpus_that_cannot_serve_are_said_and_nothing_is_started(clone):
    ended = served(clone, "gpu", doctor="echo 'gpu 0: it has no FP8'\nexit 1")
    assert ended.returncode == 1
    assert "it has no FP8" in ended.stdout and "called: serve" not in ended.stdout
    assert "STACK=cpu make serve" in ended.stderr
