"""What the facts of machines that are not at hand mean for a deployment."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rollout_service.cli import checks, machine
from rollout_service.cli.checks import Plan, Problem
from rollout_service.cli.machine import TorchCuda
from rollout_service.cli.main import app
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import CPU, GPU, args_of, read_document
from rollout_service.gpu.nvidia_smi import Gpu
from rollout_service.local import free_port
from rollout_service.model.weight_files import INDEX_FILE
from rollout_service.runtime.memory import Memory, memory
from tests.support.certificates import make_certificate
from tests.support.models import make_model, stored_shapes

GB = 10**9
WITH_CUDA = TorchCuda(built_for="13.0", devices=8)
TWO_GPUS: dict[str, Any] = {
    "engine": {"tensor_parallel_size": 2},
    "scaling": {"num_gpus": 2},
    "weights": {"ingest_num_gpus": 0},
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5} | {
    "original_max_position_embeddings": 16
}


def gpu(index: int = 0, capability: tuple[int, int] = (9, 0), memory: int = 141 * GB, free: int = 140 * GB) -> Gpu:
    return Gpu(
        index=index,
        name="a GPU",
        memory_bytes=memory,
        free_bytes=free,
        compute_capability=capability,
        driver="570.86.15",
    )


def plan(version_bytes: int = 0, **sections: dict[str, Any]) -> Plan:
    """The shipped deployment for GPUs, with other sections."""
    args = read_document(GPU)["applications"][0]["args"]
    merged = {**args, **{name: {**args.get(name, {}), **fields} for name, fields in sections.items()}}
    return Plan(ServiceConfig.model_validate(merged), "127.0.0.1", 8000, version_bytes)


def on_gpus(listed: list[Gpu], wanted: Plan, cuda: TorchCuda = WITH_CUDA) -> dict[str, Problem]:
    """The problems of these GPUs, by what was checked."""
    return {problem.check: problem for problem in checks.gpu_problems(listed, cuda, wanted)}


class TestPlan:
    def test_is_what_a_shipped_deployment_says(self):
        gpus, cpu = Plan.of(read_document(GPU)), Plan.of(read_document(CPU))
        assert gpus.on_gpus and not cpu.on_gpus
        assert (cpu.host, cpu.port, gpus.gpus_at_start) == ("127.0.0.1", 8000, 1)
        document = read_document(GPU)
        del document["http_options"]
        assert (Plan.of(document).host, Plan.of(document).port) == ("0.0.0.0", 8000)  # Serve's own

    def test_knows_the_size_of_a_model_that_is_here(self, tmp_path):
        path = make_model(tmp_path / "qwen3", "qwen3")
        sized, found = checks.with_model(plan(model={"path": path}, engine={"max_model_len": 1024}))
        assert sized.version_bytes > 0 and found == []
        four = {"engine": {"tensor_parallel_size": 4}, "scaling": {"num_gpus": 4}}
        _, [problem] = checks.with_model(plan(model={"path": path}, **four))
        assert "128" in problem.found

    @pytest.mark.parametrize(
        ("changes", "engine", "is_told"),
        [
            ({}, {"max_model_len": 4096}, True),
            ({}, {"max_model_len": 64}, False),
            ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, {"max_model_len": 4096}, False),
            ({"rope_parameters": LLAMA3}, {"max_model_len": 4096}, True),
            ({"model_max_length": 4096}, {"max_model_len": 4096}, False),
            (
                {},
                {"max_model_len": 4096, "extra": {"hf_overrides": {"max_position_embeddings": 4096}}},
                False,
            ),
            ({}, {"max_model_len": 4096, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}, False),
        ],
    )
    def test_a_context_longer_than_the_model_takes_is_told(self, tmp_path, changes, engine, is_told):
        path = make_model(tmp_path / "qwen3", "qwen3")
        settings = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 128} | changes
        (path / "config.json").write_text(json.dumps(settings))
        _, found = checks.with_model(plan(model={"path": path}, engine=engine))
        told = [problem.found for problem in found if problem.check == "engine.max_model_len"]
        assert told == ([f"4096, and config.json of {path} has max_position_embeddings=128"] if is_told else [])

    def test_a_folder_without_weights_is_told_unless_there_is_a_log(self, tmp_path):
        folder, log = make_model(tmp_path / "qwen3", "qwen3"), tmp_path / "log"
        names = dict.fromkeys(stored_shapes(folder), "a.safetensors")
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        without = plan(model={"path": folder}, weights={"root": log}, engine={"max_model_len": 1024})
        _, [problem] = checks.with_model(without)
        assert "must hold *.safetensors, but it holds pickles (pytorch_model.bin)" in problem.found
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
        _, [problem] = checks.with_model(without)
        assert "missing: a.safetensors" in problem.found
        log.mkdir()
        (log / "LATEST").touch()
        assert checks.with_model(without)[1] == []

    def test_a_model_that_is_not_here_is_fetched_or_made(self, tmp_path):
        for model in ({"path": "Qwen/Qwen3-8B"}, {"path": tmp_path / "made", "create": "tiny-qwen3"}):
            same, found = checks.with_model(plan(model=model))
            assert same.version_bytes == 0 and found == []
        _, [problem] = checks.with_model(plan(model={"path": tmp_path / "missing"}))
        assert "no config.json" in problem.found


class TestGpus:
    @pytest.mark.parametrize(
        ("sections", "needed"),
        [
            ({}, 1),
            ({"scaling": {"num_gpus": 1}}, 2),
            ({"scaling": {"min_replicas": 3}}, 3),
            ({"scaling": {"groups": {"eval": {"version": 1, "replicas": 2}}}}, 3),
            ({"engine": {"tensor_parallel_size": 2}, "scaling": {"num_gpus": 2}}, 3),
            (TWO_GPUS | {"scaling": {"num_gpus": 2, "min_replicas": 2}}, 4),
        ],
        ids=["shared", "whole", "several", "pinned", "beside two", "twice two"],
    )
    def test_all_replicas_and_the_ingest_find_a_gpu(self, sections, needed):
        wanted = plan(**sections)
        assert wanted.gpus_at_start == needed
        assert on_gpus([gpu(i) for i in range(needed)], wanted) == {}
        found = on_gpus([gpu(i) for i in range(needed - 1)], wanted)
        if needed == 1:
            assert "cpu_rollout.yaml" in found["gpu"].advice
            return
        of_the_ingest = wanted.gpus_at_start > wanted.engine_gpus
        more = "what the ingest asks for needs 1 more" if of_the_ingest else f"need {needed}"
        assert found["gpus"].found.endswith(more)
        assert found["gpus"].advice.startswith("weights.ingest_num_gpus: 0") is of_the_ingest

    @pytest.mark.parametrize(
        ("cuda", "told"),
        [
            (TorchCuda(built_for=None, devices=0), "built for the CPU → STACK=gpu"),
            (TorchCuda(built_for="13.0", devices=0, error="driver is too old"), "driver 570.86.15, .* is too old"),
            (TorchCuda(built_for="13.0", devices=0), "sees 0 GPUs of the 2 .* CUDA_VISIBLE_DEVICES"),
            (TorchCuda(built_for="13.0", devices=1), "sees 1 GPUs of the 2 .* CUDA_VISIBLE_DEVICES"),
        ],
    )
    def test_a_torch_that_cannot_use_them_is_told(self, cuda, told):
        assert re.search(told, str(on_gpus([gpu(), gpu(1)], plan(**TWO_GPUS), cuda)["cuda"]))

    def test_an_ampere_has_no_fp8(self):
        found = on_gpus([gpu(capability=(8, 0))], plan())
        assert found.keys() == {"gpu 0", "gpus"}
        assert found["gpu 0"].advice == "quant.weights: int8_channel, or none, and kv_cache.dtype: bfloat16"
        bf16 = plan(quant={"weights": "none"}, kv_cache={"dtype": "bfloat16"})
        assert on_gpus([gpu(capability=(8, 0))], bf16) == {}

    def test_an_ada_multiplies_and_reads_fp8_by_triton(self):
        ada = gpu(capability=(8, 9))
        assert "TRITON_ATTN" in on_gpus([ada], plan(engine={"linear_backend": "triton"}))["gpu 0"].advice
        assert on_gpus([ada], plan())["gpu 0"].found.endswith("cutlass multiplies FP8 blocks from 9.0 on")
        by_triton = plan(engine={"attention_backend": "TRITON_ATTN", "linear_backend": "triton"})
        assert on_gpus([ada], by_triton) == {}

    def test_memory_that_others_use(self):
        assert on_gpus([gpu(free=50 * GB), gpu(1)], plan()) == {}
        alone = on_gpus([gpu(free=50 * GB)], plan())["gpu 0"].found
        assert "50.0 GB of 141.0 GB are free" in alone and "asks for 119.8 GB" in alone

    def test_weights_that_do_not_fit(self):
        h100 = gpu(memory=80 * GB, free=79 * GB)
        twice = plan(version_bytes=35 * GB, engine={"staging": "device"})
        assert "twice with the staging area take 70.0 GB of the 68" in on_gpus([h100], twice)["gpu 0"].found
        once = plan(version_bytes=70 * GB)
        assert "the weights alone take 70.0 GB of the 68.0 GB" in on_gpus([h100], once)["gpu 0"].found
        for fits in (plan(version_bytes=35 * GB), plan(version_bytes=70 * GB, **TWO_GPUS)):
            assert on_gpus([h100, gpu(1)], fits) == {}

    def test_nvcc_is_for_kernels_that_are_compiled(self, monkeypatch):
        compiled = plan(engine={"linear_backend": "deep_gemm"})
        by_channel = plan(engine={"linear_backend": "deep_gemm"}, quant={"weights": "fp8_channel"})
        for wanted, has_nvcc in ((plan(), False), (by_channel, False), (compiled, True)):
            monkeypatch.setattr(checks, "has_nvcc", lambda has_nvcc=has_nvcc: has_nvcc)
            assert list(checks.nvcc_problems(wanted)) == []
        monkeypatch.setattr(checks, "has_nvcc", lambda: False)
        [problem] = checks.nvcc_problems(compiled)
        assert problem.advice == "engine.linear_backend: auto"


@pytest.mark.parametrize(("used", "version", "kills"), [(94, 0, False), (95, 0, True), (55, 19, False), (55, 21, True)])
def test_ray_kills_above_a_share_of_memory_with_engines_on_the_cpu(used, version, kills):
    has = Memory(total_bytes=100 * GB, used_bytes=used * GB, kill_at=0.95)
    on_cpu = plan(version_bytes=version * GB, scaling={"num_gpus": 0, "min_replicas": 2})
    found = [problem.found for problem in checks.memory_problems(has, on_cpu)]
    assert bool(found) is kills and all(f"take {2 * version}.0 GB" in text for text in found)
    assert bool([*checks.memory_problems(has, plan(version_bytes=50 * GB))]) is (used == 95)  # on GPUs


def test_torch_ports_and_packages_of_this_machine():
    cuda = machine.torch_cuda()
    assert (cuda.built_for, cuda.devices) == (torch.version.cuda, torch.cuda.device_count())
    assert bool(cuda.error) is (cuda.built_for is not None and not cuda.devices)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.why_not_bound("0.0.0.0", port) == "taken by another process"
    assert machine.why_not_bound("127.0.0.1", port) is None
    assert "Cannot assign requested address" in (machine.why_not_bound("192.0.2.1", 8000) or "")
    assert machine.installed("torch") == torch.__version__
    assert machine.installed("no-such-package") is None


class TestMachine:
    """The checks of this machine, with the shipped deployment for the CPU on a port that nobody has."""

    @pytest.fixture
    def problems(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Problem]]:
        roomy = Memory(total_bytes=1 << 60, used_bytes=0, kill_at=0.95)
        monkeypatch.setattr(checks, "memory_here", lambda: roomy)

        def found(port: int | None = None, version_bytes: int = 0, **weights: object) -> list[Problem]:
            document = read_document(CPU)
            document["http_options"]["port"] = port or free_port()
            args_of(document)["weights"] |= {"root": str(tmp_path / "new" / "weights"), **weights}
            return list(checks.problems(Plan.of(document, version_bytes)))

        return found

    def test_a_version_larger_than_the_disk_is_told_unless_there_is_a_log(self, problems, tmp_path):
        assert problems() == []
        needed = 2 * shutil.disk_usage(tmp_path).total
        [problem] = problems(version_bytes=needed, root=str(tmp_path))
        assert problem.check == "weights.root" and "a version takes" in problem.found
        (tmp_path / "LATEST").touch()
        assert problems(version_bytes=needed, root=str(tmp_path)) == []

    @pytest.mark.parametrize("root", ["$NOT_SET_HERE/weights", "{}/file/weights", "{}/" + 300 * "a"])
    def test_a_root_that_is_none_here(self, problems, tmp_path, root):
        (tmp_path / "file").touch()
        assert [problem.check for problem in problems(root=root.format(tmp_path))] == ["weights.root"]

    def test_a_threshold_of_ray_that_is_no_number_is_told(self, problems, monkeypatch):
        monkeypatch.setattr(checks, "memory_here", memory)
        monkeypatch.setenv("RAY_memory_usage_threshold", "95%")
        assert [problem.check for problem in problems()] == ["memory"]

    def test_ports_that_are_taken_are_told(self, problems):
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            ports = one.getsockname()[1], two.getsockname()[1]
            found = problems(ports[0], upload_port=ports[1])
        assert [str(problem).partition(" →")[0] for problem in found] == [
            f"port {port}: taken by another process" for port in ports
        ]

    def test_a_certificate_without_its_key_is_told(self, problems, tmp_path):
        made = make_certificate(tmp_path / "one", "rollouts.example")
        files = {"upload_ssl_certfile": str(made.certfile), "upload_ssl_keyfile": str(made.keyfile)}
        assert problems(**files) == []
        made.keyfile.unlink()
        assert [problem.check for problem in problems(**files)] == ["certificate"]

    def test_doctor_prints_every_problem_and_exits_with_1(self, tmp_path):
        document = read_document(CPU)
        path = tmp_path / "deployment.yaml"
        args_of(document)["weights"]["root"] = "$NOT_SET_HERE/weights"
        with socket.create_server(("127.0.0.1", 0)) as server:
            document["http_options"]["port"] = port = server.getsockname()[1]
            path.write_text(yaml.safe_dump(document))
            ended = CliRunner().invoke(app, ["doctor", str(path)])
        assert ended.exit_code == 1 and ended.stdout == ""
        assert f"port {port}: taken" in ended.stderr and "weights.root is $NOT_SET_HERE" in ended.stderr


def test_keys_that_serve_would_ignore_are_told():
    document = read_document(CPU)
    assert list(checks.unknown_settings(document)) == []
    document["http_options"]["ssl_certfle"] = "cert.pem"
    document["http_option"] = {"port": 1}
    document["applications"][0]["route_prefx"] = "/a"
    found = {problem.check for problem in checks.unknown_settings(document)}
    assert found == {"http_option", "http_options.ssl_certfle", "applications.route_prefx"}
