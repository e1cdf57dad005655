"""The deliberately coarse quantizer makes valid codes, and bad ones: as few levels as it says."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.coarse import LEVELS, coarse_weights, quantize_coarsely
from rollout_service.errors import QuantizationError
from rollout_service.model.convert import Converter
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.blockwise import dequantize_blockwise

SHAPE = (200, 300)
"""Ragged at both edges."""


def gaussian(seed: int = 0) -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16)


@given(st.sampled_from(LEVELS), st.integers(0, 1000))
def test_a_weight_becomes_the_nearest_level_of_its_block(levels: int, seed: int) -> None:
    weight = gaussian(seed)[:128, :128]
    largest = (levels - 1) // 2
    step = float(weight.abs().max()) / largest
    codes, scales = quantize_coarsely(weight, levels)
    assert math.isclose(scales.item(), step, rel_tol=1e-6)
    error = (dequantize_blockwise(codes, scales) - weight.float()).abs()
    assert float(error.max()) <= step / 2 * (1 + 1e-5)


@pytest.mark.parametrize("levels", LEVELS)
def test_the_service_takes_them_as_they_are(levels: int) -> None:
    weights = {"norm": torch.ones(300, dtype=torch.bfloat16), "q": gaussian()}
    recipe = TrainerRecipe(weights="fp8_block", quantized=("q",))
    version = coarse_weights(weights, recipe.quantized, levels)
    stored = dict(Converter(recipe).convert(version.items()))
    assert list(stored) == ["norm", "q", "q_scale_inv"]
    assert torch.equal(stored["q"].view(torch.uint8), version["q"].view(torch.uint8))
    assert torch.equal(stored["q_scale_inv"], version["q_scale_inv"])
    assert torch.equal(stored["norm"], weights["norm"])


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="levels=8: there are quantizers of 3, 5, 7, 15"):
        quantize_coarsely(gaussian(), 8)
    with pytest.raises(QuantizationError, match=r"q\[1, 2\] is nan"):
        broken = gaussian()
        broken[1, 2] = math.nan
        coarse_weights({"q": broken}, ["q"], 3)
    with pytest.raises(ValueError, match="k, v: to be quantized, but not among the 1 weights"):
        coarse_weights({"q": gaussian()}, ["q", "v", "k"], 3)
