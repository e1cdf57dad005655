"""What the facts of machines that are not at hand mean for a deployment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_service.cli import checks
from rollout_service.cli.checks import Finding, Plan
from rollout_service.cli.machine import Disk, TorchCuda
from rollout_service.config import ServiceConfig
from rollout_service.config.deployment_file import CPU, GPU, read_document
from rollout_service.gpu.nvidia_smi import Gpu
from rollout_service.runtime.memory import Memory
from tests.support.certificates import make_certificate
from tests.support.models import make_model

GB = 10**9
WITH_CUDA = TorchCuda(built_for="13.0", devices=8)
TWO_GPUS: dict[str, Any] = {
    "engine": {"tensor_parallel_size": 2},
    "scaling": {"num_gpus": 2},
    "weights": {"ingest_num_gpus": 0},
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


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def only(findings: list[Finding], check: str) -> Finding:
    [found] = [finding for finding in findings if finding.check == check]
    return found


class TestPlan:
    def test_is_what_a_shipped_deployment_says(self):
        on_gpus, on_cpu = Plan.of(read_document(GPU)), Plan.of(read_document(CPU))
        assert on_gpus.on_gpus and not on_cpu.on_gpus
        assert (on_cpu.host, on_cpu.port, on_gpus.gpus_at_start) == ("127.0.0.1", 8000, 1)

    def test_without_an_address_it_is_serve_s(self):
        document = read_document(GPU)
        del document["http_options"]
        assert (Plan.of(document).host, Plan.of(document).port) == ("0.0.0.0", 8000)

    def test_knows_the_size_of_a_model_that_is_here(self, tmp_path):
        sized, found = checks.with_model(plan(model={"path": make_model(tmp_path / "qwen3", "qwen3")}))
        assert sized.version_bytes > 0 and found.level == "ok"
        assert found.found.startswith("qwen3: 0.00 billion parameters")

    def test_says_why_a_model_cannot_be_served(self, tmp_path):
        path = make_model(tmp_path / "qwen3", "qwen3")
        four = {"engine": {"tensor_parallel_size": 4}, "scaling": {"num_gpus": 4}}
        _, found = checks.with_model(plan(model={"path": path}, **four))
        assert found.level == "problem" and "128" in found.found

    def test_a_model_that_is_not_here_is_fetched_or_made(self, tmp_path):
        for model in ({"path": "Qwen/Qwen3-8B"}, {"path": tmp_path / "made", "create": "tiny-qwen3"}):
            same, found = checks.with_model(plan(model=model))
            assert same.version_bytes == 0 and found.level == "ok"
        _, found = checks.with_model(plan(model={"path": tmp_path / "missing"}))
        assert found.level == "problem" and "no config.json" in found.found


class TestGpus:
    def test_a_hopper_is_fine(self):
        findings = checks.gpu_findings([gpu()], WITH_CUDA, plan())
        assert levels(findings) == {"gpu 0": "ok", "cuda": "ok"}
        assert "141.0 GB, compute capability 9.0" in findings[0].found

    def test_none_on_a_machine_that_needs_none(self):
        on_cpu = Plan.of(read_document(CPU))
        assert levels(checks.gpu_findings([], WITH_CUDA, on_cpu)) == {"gpu": "ok"}
        idle = only(checks.gpu_findings([gpu(), gpu(1)], WITH_CUDA, on_cpu), "gpu")
        assert idle.level == "warning" and "2 GPUs stay idle" in idle.found

    def test_none_where_engines_need_one(self):
        found = only(checks.gpu_findings([], WITH_CUDA, plan()), "gpu")
        assert found.level == "problem" and "cpu_rollout.yaml" in found.advice

    def test_an_ampere_has_no_fp8(self):
        findings = checks.gpu_findings([gpu(capability=(8, 0))], WITH_CUDA, plan())
        assert levels(findings) == {"gpu 0": "problem", "cuda": "ok", "gpus": "problem"}
        assert only(findings, "gpu 0").advice == "quant.weights: int8_channel, or none, and kv_cache.dtype: bfloat16"
        bf16 = plan(quant={"weights": "none"}, kv_cache={"dtype": "bfloat16"})
        assert levels(checks.gpu_findings([gpu(capability=(8, 0))], WITH_CUDA, bf16)) == {"gpu 0": "ok", "cuda": "ok"}

    def test_an_ada_multiplies_and_reads_fp8_by_triton(self):
        ada = gpu(capability=(8, 9))
        found = only(checks.gpu_findings([ada], WITH_CUDA, plan(engine={"linear_backend": "triton"})), "gpu 0")
        assert found.level == "problem" and "TRITON_ATTN" in found.advice
        cutlass = only(checks.gpu_findings([ada], WITH_CUDA, plan()), "gpu 0")
        assert cutlass.found.endswith("cutlass multiplies FP8 blocks from 9.0 on")
        assert cutlass.advice == "engine.linear_backend: triton, or quant.weights: fp8_channel, or none"
        by_triton = plan(engine={"attention_backend": "TRITON_ATTN", "linear_backend": "triton"})
        assert levels(checks.gpu_findings([ada], WITH_CUDA, by_triton)) == {"gpu 0": "ok", "cuda": "ok"}

    def test_memory_that_others_use(self):
        findings = checks.gpu_findings([gpu(free=50 * GB), gpu(1)], WITH_CUDA, plan())
        assert levels(findings) == {"gpu 0": "warning", "gpu 1": "ok", "cuda": "ok"}
        assert "50.0 GB of 141.0 GB are free" in findings[0].found and "asks for 119.8 GB" in findings[0].found
        alone = checks.gpu_findings([gpu(free=50 * GB)], WITH_CUDA, plan())
        assert only(alone, "gpu 0").level == "problem"

    def test_weights_that_do_not_fit(self):
        h100 = gpu(memory=80 * GB, free=79 * GB)
        for large, says in (
            (
                plan(version_bytes=35 * GB, engine={"staging": "device"}),
                "twice with the staging area take 70.0 GB of the 68",
            ),
            (plan(version_bytes=70 * GB), "the weights alone take 70.0 GB of the 68.0 GB"),
        ):
            found = only(checks.gpu_findings([h100], WITH_CUDA, large), "gpu 0")
            assert found.level == "problem" and says in found.found
        for fits in (
            plan(version_bytes=35 * GB),
            plan(version_bytes=70 * GB, **TWO_GPUS),
        ):
            assert set(levels(checks.gpu_findings([h100, gpu(1)], WITH_CUDA, fits)).values()) == {"ok"}

    def test_too_few_for_the_first_replicas(self):
        four = plan(**TWO_GPUS | {"scaling": {"num_gpus": 2, "min_replicas": 2}})
        found = only(checks.gpu_findings([gpu(i) for i in range(3)], WITH_CUDA, four), "gpus")
        assert found.found == "3 can be used, and 2 replicas of 2 GPUs each need 4"
        assert "gpus" not in levels(checks.gpu_findings([gpu(i) for i in range(4)], WITH_CUDA, four))

    @pytest.mark.parametrize(
        ("sections", "needed"),
        [
            ({}, 1),
            ({"scaling": {"num_gpus": 1}}, 2),
            ({"scaling": {"min_replicas": 3}}, 3),
            ({"scaling": {"groups": {"eval": {"version": 1, "replicas": 2}}}}, 3),
            ({"engine": {"tensor_parallel_size": 2}, "scaling": {"num_gpus": 2}}, 3),
            (TWO_GPUS, 2),
        ],
        ids=["shared", "whole", "several", "pinned", "beside two", "two"],
    )
    def test_the_gpus_of_the_ingest_count(self, sections, needed):
        wanted = plan(**sections)
        assert wanted.gpus_at_start == needed
        assert "gpus" not in levels(checks.gpu_findings([gpu(i) for i in range(needed)], WITH_CUDA, wanted))

    def test_a_gpu_that_only_the_ingest_lacks_is_told(self):
        beside = plan(engine={"tensor_parallel_size": 2}, scaling={"num_gpus": 2})
        found = only(checks.gpu_findings([gpu(), gpu(1)], WITH_CUDA, beside), "gpus")
        assert found.found.endswith("need 2; what the ingest asks for needs 1 more")
        assert found.advice.startswith("weights.ingest_num_gpus: 0")

    def test_a_torch_without_cuda(self):
        findings = checks.gpu_findings([gpu()], TorchCuda(built_for=None, devices=0), plan())
        assert only(findings, "cuda").level == "problem" and "STACK=gpu" in only(findings, "cuda").advice

    def test_a_driver_that_is_too_old(self):
        torch = TorchCuda(built_for="13.0", devices=0, error="The NVIDIA driver on your system is too old")
        found = only(checks.gpu_findings([gpu()], torch, plan()), "cuda")
        assert found.level == "problem" and "570.86.15" in found.found and "too old" in found.found

    def test_devices_that_are_hidden(self):
        two = plan(**TWO_GPUS)
        for seen in (0, 1):
            torch = TorchCuda(built_for="13.0", devices=seen)
            found = only(checks.gpu_findings([gpu(), gpu(1)], torch, two), "cuda")
            assert found.level == "problem" and "CUDA_VISIBLE_DEVICES" in found.found + found.advice

    def test_nvcc_is_for_kernels_that_are_compiled(self):
        assert checks.nvcc_finding(None, plan()).level == "ok"
        compiled = plan(engine={"linear_backend": "deep_gemm"})
        assert checks.nvcc_finding(None, compiled).advice == "engine.linear_backend: cutlass"
        assert checks.nvcc_finding(None, compiled).level == "problem"
        by_channel = plan(engine={"linear_backend": "auto"}, quant={"weights": "fp8_channel"})
        assert checks.nvcc_finding(None, by_channel).level == "ok"
        assert checks.nvcc_finding("/usr/local/cuda/bin/nvcc, 13.0", compiled).level == "ok"


class TestMemory:
    @pytest.mark.parametrize(("used", "level"), [(80, "ok"), (90, "warning"), (95, "problem")])
    def test_ray_kills_above_a_share(self, used, level):
        has = Memory(total_bytes=100 * GB, used_bytes=used * GB, kill_at=0.95)
        found = checks.memory_finding(has, plan(version_bytes=50 * GB))
        assert found.level == level and f"{used}% are in use" in found.found

    @pytest.mark.parametrize(("version", "level"), [(19, "ok"), (21, "problem")])
    def test_engines_on_the_cpu_are_in_it(self, version, level):
        on_cpu = plan(version_bytes=version * GB, scaling={"num_gpus": 0, "min_replicas": 2})
        has = Memory(total_bytes=100 * GB, used_bytes=55 * GB, kill_at=0.95)
        found = checks.memory_finding(has, on_cpu)
        assert found.level == level and ("engines take 42.0 GB" in found.found) is (level == "problem")


class TestDisks:
    @staticmethod
    def found(disk: Disk, *, has_log: bool = False, version_bytes: int = 10 * GB) -> Finding:
        return checks.weights_finding(disk, has_log, plan(version_bytes))

    @pytest.mark.parametrize(("free", "level"), [(9, "problem"), (29, "warning"), (30, "ok")])
    def test_the_log_must_hold_its_versions(self, free, level):
        disk = Disk(folder=Path("/data"), free_bytes=free * GB, writable=True)
        assert self.found(disk).level == level
        assert self.found(disk, has_log=True).level == "ok", "a log that is there has its room already"
        assert self.found(disk, version_bytes=0).level == "ok"

    def test_a_disk_that_is_read_only(self):
        disk = Disk(folder=Path("/data"), free_bytes=900 * GB, writable=False)
        assert self.found(disk).level == "problem"

    def test_a_root_that_is_none_here(self, tmp_path):
        (tmp_path / "file").write_text("")
        for root in ("$NOT_SET_HERE/weights", tmp_path / "file" / "weights"):
            [found] = checks.weights(plan(weights={"root": root}))
            assert found.level == "problem" and found.check == "weights.root"


class TestPorts:
    def test_the_upload_port_counts_if_it_is_fixed(self):
        assert len(list(checks.ports(plan()))) == 1
        fixed = list(checks.ports(plan(weights={"upload_port": 9000})))
        assert [finding.check for finding in fixed][-1] == "port 9000"


class TestTls:
    def test_without_certificates_there_is_nothing_to_say(self):
        assert list(checks.tls(plan())) == []

    def test_certificates_of_both_are_looked_at(self, tmp_path):
        made = make_certificate(tmp_path / "one", "rollouts.example")
        upload = {"upload_ssl_certfile": made.certfile, "upload_ssl_keyfile": tmp_path / "missing.key"}
        both = replace(plan(weights=upload), certificate=(made.certfile, made.keyfile))
        assert levels(list(checks.tls(both))) == {"certificate": "ok", "certificate of uploads": "problem"}
