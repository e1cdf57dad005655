"""The demo on a machine with the GPU stack: it runs on the GPU, or says why not."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from examples import grpo_digits
from rollout_service.cli import machine
from rollout_service.cli.machine import TorchCuda
from rollout_service.gpu import nvidia_smi
from rollout_service.gpu.nvidia_smi import Gpu
from rollout_service.local import load_config

HOPPER = Gpu(
    index=0,
    name="a GPU",
    memory_bytes=80 * 10**9,
    free_bytes=79 * 10**9,
    compute_capability=(9, 0),
    driver="570.86.15",
)
PROJECT = Path(__file__).parents[3]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """What nvidia-smi lists."""
    listed: list[Gpu] = []
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(nvidia_smi, "gpus", lambda: tuple(listed))
    monkeypatch.setattr(machine, "torch_cuda", lambda: TorchCuda(built_for="13.0", devices=len(listed)))
    return listed


def test_the_engine_and_the_ingest_share_the_gpu(gpus):
    config = load_config(grpo_digits.DEPLOYMENT, grpo_digits.on_a_gpu({"weights": {"root": "elsewhere"}}))
    assert config.scaling.num_gpus + config.weights.ingest_num_gpus == 1
    assert config.weights.root == Path("elsewhere") and config.engine.linear_backend == "cutlass"
    gpus.append(HOPPER)
    assert grpo_digits.no_gpu(config) == []


def test_a_gpu_that_cannot_serve_it_is_named(gpus):
    gpus.append(HOPPER.model_copy(update={"compute_capability": (8, 0)}))
    [why, _] = grpo_digits.no_gpu(load_config(grpo_digits.DEPLOYMENT, grpo_digits.on_a_gpu({})))
    assert why.startswith("gpu 0: a GPU, 80.0 GB, compute capability 8.0: it has no FP8")


def test_the_demo_says_why_it_does_not_start(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "installed", lambda name: "0.32.0" if name == "vllm" else None)
    monkeypatch.setattr(grpo_digits, "running_service", lambda *_: pytest.fail("it started"))
    app = typer.Typer()
    app.command()(grpo_digits.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "nvidia-smi lists none" in said and "STACK=cpu make demo" in said
