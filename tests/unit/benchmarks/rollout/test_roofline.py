"""The least that a step can take, by hand for a model of two layers."""

import json
from pathlib import Path

import pytest

from benchmarks.common.gpu_limits import GpuLimits
from benchmarks.common.gpu_service import Mode
from benchmarks.common.shapes import SHAPES, Shape, write_config
from benchmarks.group_attention import asked
from benchmarks.rollout.roofline import own_tokens, parts, roofline, tokens_at
from rollout_service.model.served_model import ServedModel

LIMITS = GpuLimits(copy_bytes_per_s=4e12, read_bytes_per_s=5e12, fp8_flops=1e15, bf16_flops=5e14)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_config(Shape.QWEN3_8B, tmp_path_factory.mktemp("models") / "m", layers=2)
    return ServedModel.load(folder)


def test_a_groups_prompt_is_read_once_and_attended_to_by_each() -> None:
    tokens = tokens_at(asked("100:4x8x1000+64"), own=10)
    assert tokens.read == 100 + 4 * 1000 + 32 * 10
    assert tokens.attended == 32 * (100 + 1000 + 10)
    assert own_tokens(asked("100:4x8x1000+64"), tokens.read) == 10


def test_the_parts_of_a_step_of_qwen3_8b(model: ServedModel) -> None:
    """Of each layer 4096 × (6144 + 4096 + 3 × 12288) weights; 8 KV heads and 32 query heads of 128."""
    weights = 2 * 4096 * (6144 + 4096 + 3 * 12288)
    linear, head, attention = parts(model, Mode.FP8KV, 256, tokens_at(asked("16x16x4096+512"), own=288))
    assert linear.nbytes == pytest.approx(weights + 4 * weights / 128**2)
    assert linear.flops == 2 * 256 * weights and linear.in_fp8
    assert (head.nbytes, head.flops) == (2 * 151936 * 4096, 2 * 256 * 151936 * 4096) and not head.in_fp8
    assert attention.nbytes == 2 * 2 * 8 * 128 * (16 * 4096 + 256 * 288)
    assert attention.flops == 4 * 2 * 32 * 128 * 256 * (4096 + 288) and attention.in_fp8


def test_without_fp8_two_bytes_are_read_for_each_number(model: ServedModel) -> None:
    tokens = tokens_at(asked("16x16x4096+512"), own=288)
    fp8, bf16 = (parts(model, mode, 256, tokens) for mode in (Mode.FP8KV, Mode.BF16))
    assert bf16[0].nbytes == 2 * fp8[0].nbytes / (1 + 4 / 128**2) and bf16[1] == fp8[1]
    assert bf16[2].nbytes == 2 * fp8[2].nbytes
    assert not any(part.in_fp8 for part in bf16)


def test_a_part_takes_the_longer_of_reading_and_computing(model: ServedModel) -> None:
    """Many sequences compute for longer than they read weights, one reads for longer."""
    for sequences, longer in ((1, "reading_ms"), (1024, "computing_ms")):
        found = roofline(model, Mode.FP8KV, sequences, tokens_at(asked(f"{sequences}x1x64+64"), own=0), LIMITS)
        for part in found["parts"][:2]:
            assert part["limit_ms"] == part[longer] == max(part["reading_ms"], part["computing_ms"])
        assert found["limit_ms"] == pytest.approx(sum(part["limit_ms"] for part in found["parts"]))
    linear, head, _ = found["parts"]
    assert linear["reading_ms"] == pytest.approx(1e3 * linear["bytes"] / 5e12)  # at the faster of both
    assert linear["computing_ms"] == pytest.approx(1e3 * linear["flops"] / 1e15)
    assert head["computing_ms"] == pytest.approx(1e3 * head["flops"] / 5e14)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = SHAPES[Shape.QWEN3_30B_A3B] | {"num_hidden_layers": 1, "num_experts": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a mixture of experts"):
        parts(ServedModel.load(tmp_path), Mode.FP8, 1, tokens_at(asked("1x1x1+1"), own=1))
