"""Environment variables of an engine's processes."""

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine import environment
from rollout_service.engine.environment import engine_environment


def of(replicas: int, share: float) -> dict[str, str]:
    scaling = {"min_replicas": replicas, "max_replicas": replicas}
    engine = {"gpu_memory_utilization": share}
    return engine_environment(ServiceConfig.model_validate({"scaling": scaling, "engine": engine}))


def test_any_fleet_on_gpus_shares_one_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_vllm_for_cpu", lambda: False)
    assert of(1, 0.85) == of(4, 0.6)


def test_cpu_engines_that_share_a_machine_are_not_bound() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in of(1, 0.85) and of(2, 0.85)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
