"""The compiled quantizer writes the bytes of the reference. What a GPU does is in tests/gpu."""

import sys

import pytest
import torch
from hypothesis import given, settings

from rollout_service.errors import QuantizationError
from rollout_service.quant import quantizer
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.cpu import quantize_blocks_cpu, quantize_channels_cpu
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL
from rollout_service.quant.quantizer import Quantizer
from tests.support.matrices import every_pair_of_mantissas, weights

WEIGHTS = [
    ("q", torch.randn(256, 128).bfloat16()),
    ("experts", torch.randn(3, 130, 70)),
    ("k", torch.randn(5, 1).half()),
]


def assert_bytes_of_the_reference(weight: torch.Tensor, power_of_two: bool = False) -> None:
    codes, scales = quantize_blocks_cpu(weight, power_of_two=power_of_two)
    expected_codes, expected_scales = quantize_blockwise(weight, power_of_two=power_of_two)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


def assert_channels_of_the_reference(weight: torch.Tensor) -> None:
    for form in (FP8_CHANNEL, INT8_CHANNEL):
        codes, scales = quantize_channels_cpu(weight, dtype=form.dtype)
        expected_codes, expected_scales = form.quantize(weight)
        assert codes.dtype == expected_codes.dtype == form.dtype
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@settings(max_examples=100)
@given(weights(views=True, stacked=True))
def test_codes_and_scales_are_bit_for_bit_the_references(weight):
    assert_bytes_of_the_reference(weight)
    assert_bytes_of_the_reference(weight, power_of_two=True)
    assert_channels_of_the_reference(weight)


def test_every_pair_of_mantissas_is_divided_as_in_the_reference():
    assert_bytes_of_the_reference(every_pair_of_mantissas())
    of_rows = every_pair_of_mantissas().view(128, 128, 128).transpose(0, 1).reshape(128, -1)
    assert_channels_of_the_reference(of_rows)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_bytes_of_the_reference(torch.randn(2, 700, 130))
        assert_channels_of_the_reference(torch.randn(2, 700, 130))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_only_the_block_with_a_bad_weight_gets_the_scale_nan(bad):
    weight = torch.randn(300, 300)
    weight[200, 5] = bad
    nan = quantize_blocks_cpu(weight)[1].isnan()
    assert nan.nonzero().tolist() == [[1, 0]]
    for form in (FP8_CHANNEL, INT8_CHANNEL):
        assert quantize_channels_cpu(weight, dtype=form.dtype)[1].isnan().nonzero().tolist() == [[200, 0]]


def test_the_first_bad_weight_is_named_with_its_index():
    bad = torch.zeros(200, 200)
    bad[130, 2] = float("nan")
    with pytest.raises(QuantizationError, match=r"^down\[130, 2\] is nan"):
        Quantizer(device="cpu").quantize([*WEIGHTS, ("down", bad), ("other", bad)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_where_there_is_none_is_an_error():
    with pytest.raises(ValueError, match=r"device is cuda, but torch sees no GPU"):
        Quantizer(device="cuda")


@pytest.mark.parametrize("power_of_two", [False, True])
def test_without_numba_torch_writes_the_same_bytes_and_logs_it(monkeypatch, caplog, power_of_two):
    compiled = Quantizer(device="cpu", power_of_two=power_of_two).quantize(WEIGHTS)
    monkeypatch.delitem(sys.modules, "rollout_service.quant.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    quantizer._cpu_quantizer.cache_clear()
    try:
        by_torch = Quantizer(device="cpu", power_of_two=power_of_two).quantize(WEIGHTS)
    finally:
        quantizer._cpu_quantizer.cache_clear()
    for (codes, scales), expected in zip(by_torch, compiled, strict=True):
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])
    assert "numba is not installed" in caplog.text
    assert Quantizer().quantize([]) == []
