"""The torch reference for channels is the specification: here it is held against the formula computed a second way."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given

from rollout_service.errors import QuantizationError
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL, WeightFormat
from tests.support.matrices import weights
from tests.unit.quant import e4m3

CHANNELS = {form.name: form for form in (FP8_CHANNEL, INT8_CHANNEL)}
ENCODE: dict[str, Callable[[e4m3.Floats], e4m3.Bytes]] = {
    "fp8_channel": e4m3.encode,
    "int8_channel": lambda quotients: np.rint(quotients).astype(np.int8).view(np.uint8),
}


def quantized(weight: e4m3.Floats, form: WeightFormat) -> tuple[e4m3.Bytes, e4m3.Floats]:
    """Codes' bits [N, K] and scales [N, 1], by numpy."""
    largest = np.float32(form.largest_code)
    rounded = e4m3.bf16_rounded(np.ascontiguousarray(weight))
    amax = np.abs(rounded).max(axis=1, keepdims=True, initial=0)
    scales = (np.maximum(amax, np.float32(1e-12)) / largest).astype(np.float32)
    return ENCODE[form.name](np.clip(rounded / scales, -largest, largest)), scales


@pytest.mark.parametrize("form", CHANNELS.values(), ids=CHANNELS)
@given(weight=weights())
def test_codes_and_scales_are_those_of_the_formula(form, weight):
    codes, scales = form.quantize(weight)
    expected_codes, expected_scales = quantized(weight.float().numpy(), form)
    assert codes.dtype == form.dtype and codes.is_contiguous()
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)
    torch.testing.assert_close(form.dequantize(codes, scales), codes.float() * torch.from_numpy(expected_scales))


@pytest.mark.parametrize("form", CHANNELS.values(), ids=CHANNELS)
def test_every_code_comes_back_as_itself(form):
    all_codes = torch.arange(256, dtype=torch.uint8).view(form.dtype)
    values = all_codes.float()
    kept = ~values.isnan() & (values != -128)
    codes, scales = form.quantize(values[kept][None])
    assert scales.tolist() == [[1.0]]
    assert codes.view(torch.uint8)[0].tolist() == all_codes[kept].view(torch.uint8).tolist()


@pytest.mark.parametrize("form", CHANNELS.values(), ids=CHANNELS)
def test_a_row_knows_nothing_of_the_others(form):
    weight = torch.randn(3, 5, 300)
    weight[1, 2] *= 1e20
    codes, scales = form.quantize(weight)
    assert scales.shape == (3, 5, 1)
    for expert, row in np.ndindex(3, 5):
        alone = form.quantize(weight[expert, row][None])
        assert torch.equal(codes[expert, row].float(), alone[0][0].float())
        assert torch.equal(scales[expert, row], alone[1][0])


@pytest.mark.parametrize("form", CHANNELS.values(), ids=CHANNELS)
def test_nan_and_what_is_no_matrix_are_named(form):
    weight = torch.zeros(4, 5)
    weight[3, 2] = float("nan")
    with pytest.raises(QuantizationError, match=r"q\[3, 2\] is nan"):
        form.quantize(weight, "q")
    with pytest.raises(QuantizationError, match=r"norm has 1 dimensions; channelwise quantization takes matrices"):
        form.quantize(torch.zeros(4), "norm")
