"""Bit for bit, decided on the hardware: the Triton kernel against the torch reference on the GPU and on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from rollout_service.engine.cpu.linear import through_fp8, through_int8
from rollout_service.errors import QuantizationError
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL, WEIGHT_FORMATS
from rollout_service.quant.quantizer import Quantizer
from tests.support.grouped import assert_bytes_of_the_reference
from tests.support.matrices import VIEWS, bf16_from_bits, every_pair_of_mantissas, weights

GPU = torch.device("cuda")
BF16_INFINITY = 0x7F80


@settings(deadline=None, max_examples=400)
@given(st.lists(weights(), max_size=4), st.sampled_from(sorted(VIEWS)), st.booleans())
def test_a_group_of_any_matrices_gets_the_bytes_of_the_reference(group, view, power_of_two):
    assert_bytes_of_the_reference([VIEWS[view](weight.to(GPU)) for weight in group], power_of_two=power_of_two)


@settings(deadline=None, max_examples=100)
@given(st.lists(weights(stacked=True), max_size=4))
def test_stacked_experts_too(group):
    assert_bytes_of_the_reference([weight.to(GPU) for weight in group])


@settings(deadline=None, max_examples=40)  # Triton compiles the kernel anew for nearly each of them
@given(st.lists(weights(), max_size=4), st.sampled_from(sorted(VIEWS)), st.sampled_from([FP8_CHANNEL, INT8_CHANNEL]))
def test_rows_too(group, view, form):
    assert_bytes_of_the_reference([VIEWS[view](weight.to(GPU)) for weight in group], form=form)


@pytest.mark.parametrize("view", ["contiguous", "transposed"])
def test_every_pair_of_mantissas_divides_as_in_the_reference(view):
    pairs = every_pair_of_mantissas()
    assert_bytes_of_the_reference([VIEWS[view](pairs.to(GPU))])
    of_rows = pairs.view(128, 128, 128).transpose(0, 1).reshape(128, -1)
    for form in (FP8_CHANNEL, INT8_CHANNEL):
        assert_bytes_of_the_reference([VIEWS[view](of_rows.to(GPU))], form=form)


def test_every_finite_bf16_below_every_amax_exponent():
    bits = torch.arange(BF16_INFINITY)
    finite = bf16_from_bits(torch.cat([bits, bits | 0x8000]).numpy()).to(GPU)
    for exponent in range(1, 255, 2):
        amax = bf16_from_bits(torch.tensor([exponent << 7 | 0x35]).numpy()).to(GPU)
        smaller = finite[finite.abs() <= amax]
        blocks = torch.zeros(-(-smaller.numel() // 16256) * 16384, dtype=torch.bfloat16, device=GPU).view(-1, 128, 128)
        blocks[:, 0, :] = amax
        body = torch.zeros(blocks.shape[0] * 16256, dtype=torch.bfloat16, device=GPU)
        body[: smaller.numel()] = smaller
        blocks[:, 1:] = body.view(-1, 127, 128)
        assert_bytes_of_the_reference([blocks])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matrices_of_a_real_models_size(dtype):
    shapes = [(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (16, 1536, 2048), (16, 2048, 768), (576, 7168)]
    matrices = [(torch.randn(shape, device=GPU) * 0.02).to(dtype) for shape in shapes]
    for form in WEIGHT_FORMATS.values():
        assert_bytes_of_the_reference(matrices, form=form)


def test_cpu_weights_come_back_from_the_gpu_with_the_same_bytes():
    named = [("q", torch.randn(256, 128).bfloat16()), ("odd", torch.randn(5, 3)), ("k", torch.randn(130, 70).half())]
    for device in ("cuda", "cpu"):
        for (_, weight), (codes, scales) in zip(named, Quantizer(device=device).quantize(named), strict=True):
            expected = quantize_blockwise(weight)
            assert codes.device.type == scales.device.type == "cpu"
            assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
            assert torch.equal(scales, expected[1])


def test_gpu_weights_stay_on_the_gpu_even_with_device_cpu():
    codes, scales = Quantizer(device="cpu").quantize([("w", torch.randn(128, 128, device=GPU))])[0]
    assert codes.is_cuda and scales.is_cuda


def test_all_results_come_to_the_cpu_if_asked():
    named = [("w", torch.randn(128, 256, device=GPU)), ("odd", torch.randn(5, 3, device=GPU))]
    for (_, weight), (codes, scales) in zip(named, Quantizer().quantize(named, to_cpu=True), strict=True):
        assert codes.device.type == scales.device.type == "cpu"
        assert torch.equal(codes.view(torch.uint8), quantize_blockwise(weight.cpu())[0].view(torch.uint8))


def test_a_weight_that_is_still_being_computed_is_waited_for():
    weight = torch.randn(4096, 4096, device=GPU)
    for _ in range(20):
        weight = weight @ weight * 0.01
    quantized = Quantizer().quantize([("w", weight.bfloat16())])[0]
    expected = quantize_blockwise(weight.bfloat16())
    assert torch.equal(quantized[0].view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_the_first_bad_weight_is_named_with_its_index(bad):
    weights = [(f"w{i}", torch.zeros(300, 300, device=GPU)) for i in range(3)]
    weights[1][1][299, 131] = bad
    with pytest.raises(QuantizationError, match=r"^w1\[299, 131\] is"):
        Quantizer().quantize(weights)


def test_nothing_is_allocated_but_the_output_and_a_small_table():
    weights = [(str(i), torch.randn(8, 256, 512, device=GPU, dtype=torch.bfloat16)) for i in range(64)]
    Quantizer().quantize(weights)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantized = Quantizer().quantize(weights)
    peak = torch.cuda.max_memory_allocated() - before
    output = sum(t.numel() * t.element_size() for pair in quantized for t in pair)
    assert peak - output < 1 << 20


@pytest.fixture
def inputs() -> torch.Tensor:
    """BF16 [64, 4096], of tokens from 1e-8 to 1e8, and one of zeros."""
    inputs = torch.randn(64, 4096).bfloat16() * torch.logspace(-8, 8, 64).bfloat16()[:, None]
    inputs[7] = 0
    return inputs


def test_engines_on_the_cpu_round_inputs_to_fp8_as_vllms_kernel_does(inputs):
    codes, scales = ops.scaled_fp8_quant(inputs.to(GPU), use_per_token_if_dynamic=True)
    assert torch.equal(through_fp8(inputs), (codes.float() * scales).cpu())


def test_engines_on_the_cpu_round_inputs_to_int8_as_vllms_kernel_does(inputs):
    codes, scales, *_ = ops.scaled_int8_quant(inputs.to(GPU))
    assert torch.equal(through_int8(inputs), (codes.float() * scales).cpu())
