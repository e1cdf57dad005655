"""Many weights in one call. What a GPU does is in tests/gpu."""

import sys

import pytest
import torch

from rollout_service.errors import QuantizationError
from rollout_service.quant import quantizer
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.quantizer import Quantizer

WEIGHTS = [
    ("q", torch.randn(256, 128).bfloat16()),
    ("experts", torch.randn(3, 130, 70)),
    ("k", torch.randn(5, 1).half()),
]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_each_weight_gets_the_codes_and_scales_of_the_reference(power_of_two):
    quantized = Quantizer(power_of_two=power_of_two, device="cpu").quantize(WEIGHTS)
    for (_, weight), (codes, scales) in zip(WEIGHTS, quantized, strict=True):
        expected = quantize_blockwise(weight, power_of_two=power_of_two)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales, expected[1])


def test_no_weights_give_nothing():
    assert Quantizer().quantize([]) == []


def test_the_first_bad_weight_is_named_with_its_index():
    bad = torch.zeros(200, 200)
    bad[130, 2] = float("nan")
    with pytest.raises(QuantizationError, match=r"^down\[130, 2\] is nan"):
        Quantizer(device="cpu").quantize([*WEIGHTS, ("down", bad), ("other", bad)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_where_there_is_none_is_an_error():
    with pytest.raises(ValueError, match=r"device is cuda, but torch sees no GPU"):
        Quantizer(device="cuda")


def test_without_numba_torch_writes_the_same_bytes_and_logs_it(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "rollout_service.quant.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    quantizer._cpu_quantizer.cache_clear()
    try:
        (codes, _), *_ = Quantizer(device="cpu").quantize(WEIGHTS)
    finally:
        quantizer._cpu_quantizer.cache_clear()
    assert torch.equal(codes.view(torch.uint8), quantize_blockwise(WEIGHTS[0][1])[0].view(torch.uint8))
    assert "numba is not installed" in caplog.text
