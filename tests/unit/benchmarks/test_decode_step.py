"""The figures of benchmarks.rollout.decode_step that need no GPU."""

import pytest

from benchmarks.common.gpu_service import Mode
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.step_profile import kind_of, summary
from benchmarks.common.work import WorkOptions
from benchmarks.rollout.decode_step import differences, own_tokens
from benchmarks.rollout.roofline import GpuLimits, parts, roofline
from rollout_service.model.served_model import ServedModel

STEP = {"cat": "user_annotation", "name": "execute_context_0(0)_generation_2(2)", "ts": 0, "dur": 9, "tid": 1}


def event(kind, name, start, duration):
    return {"cat": kind, "name": name, "ts": start, "dur": duration, "tid": 1}


def test_settings_go_to_the_service_the_environment_or_vllm():
    assert differences("engine.linear_backend=deep_gemm; env.A=1; async_scheduling=false") == (
        {"linear_backend": "deep_gemm"},
        {"A": "1"},
        {"async_scheduling": False},
    )
    assert differences("") == ({}, {}, {})


@pytest.mark.parametrize(("prompt", "own_pages"), [(4096, 2.5), (4101, 1.5)])
def test_own_tokens_follow_from_the_used_pages(prompt, own_pages):
    shared = 2 * ((prompt - 1) // 64)
    found = own_tokens(shared + 8 * own_pages, [prompt, prompt], 8, 64)
    assert found == 64 * own_pages - 32 - (prompt - (prompt - 1) // 64 * 64)


def test_a_setting_without_value_is_refused():
    with pytest.raises(ValueError, match="'mp' has no value"):
        differences("mp")


def test_kernels_of_a_trace_are_summed_per_step():
    kernels = [event("kernel", "nvjet_tst", 0, 3000), event("kernel", "_gumbel_sample_kernel", 4000, 1000)]
    found = summary([STEP, STEP, *kernels, event("cpu_op", "aten::mm", 0, 9000)])
    assert found["ms"] == {"matrix products": 1.5, "sampling": 0.5}
    assert (found["kernels_ms"], found["recorded_step_ms"]) == (2.0, 2.5)


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="1 kernels of 0 steps"):
        summary([event("kernel", "nvjet_tst", 0, 1)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("per_token_group_quant_8bit_kernel", "quantizing activations"),
        ("void vllm::reshape_and_cache_flash_kernel", "KV cache writes"),
        ("memcpy128", "other"),
    ],
)
def test_a_kernel_has_the_kind_of_its_name(name, kind):
    assert kind_of(name) == kind


def test_roofline_of_qwen3_8b_is_its_bytes_and_operations(tmp_path):
    model = ServedModel.load(write_config(Shape.QWEN3_8B, tmp_path))
    work = WorkOptions(prompt_min=4096, prompt_max=4096)
    linear, head, attention = parts(model, Mode.FP8KV, work, own=288)
    assert linear.flops == 2 * 256 * 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288)
    assert head.nbytes == 2 * 151936 * 4096
    assert attention.nbytes == 36 * 2 * 8 * 128 * (16 * 4096 + 256 * 288)
    found = roofline(model, Mode.FP8KV, work, 288, GpuLimits(1e12, 1e30, 1e30))
    assert found["limit_ms"] == pytest.approx((linear.nbytes + head.nbytes + attention.nbytes) / 1e9)


def test_a_small_batch_reads_only_the_experts_it_chooses(tmp_path):
    model = ServedModel.load(write_config(Shape.QWEN3_30B_A3B, tmp_path))
    one, many = (parts(model, Mode.BF16, WorkOptions(groups=1, n=n), own=0)[-1] for n in (1, 256))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert one.nbytes == pytest.approx(experts * 8 / 128)
    assert many.nbytes == pytest.approx(experts, rel=1e-6)
