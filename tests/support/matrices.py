"""Weights of every shape, stride, dtype and value pattern that a quantizer can meet, for hypothesis."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

DIMS = st.sampled_from([0, 1, 2, 127, 128, 129, 256]) | st.integers(0, 300)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BF16_MAX = 0x7F7F


def bf16_from_bits(bits: np.ndarray) -> torch.Tensor:
    """BF16 of any bits, integers below 2^16."""
    return torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)


def pattern(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """FP32 values that are finite in BF16."""
    normal = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    if kind == "zeros":
        return torch.zeros(shape) * normal.sign()  # of both signs
    if kind == "subnormals":
        return normal * 1e-39
    if kind == "below the floor":
        return normal * 1e-13
    if kind == "every exponent":
        magnitude = rng.integers(0, BF16_MAX + 1, shape)
        return bf16_from_bits(magnitude | (rng.integers(0, 2, shape) << 15)).float()
    if kind == "extremes":
        return torch.from_numpy(rng.choice(np.array([3.38e38, -3.38e38, 1e-45, -1e-38, 0, 1], dtype=np.float32), shape))
    if kind == "one outlier a row":
        normal[..., :1] *= 1e6
    return normal


KINDS = ["normal", "zeros", "subnormals", "below the floor", "every exponent", "extremes", "one outlier a row"]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda weight: weight,
    "transposed": lambda weight: weight.mT,
    "every second row": lambda weight: weight[..., ::2, :],
    "every third column": lambda weight: weight[..., ::3],
    "from an odd address": lambda weight: weight[..., 1:, 1:],
    "one row repeated": lambda weight: weight[..., :1, :].expand_as(weight),
}


@st.composite
def weights(draw: st.DrawFn, views: bool = False, stacked: bool = False) -> torch.Tensor:
    """[N, K], or also [E, N, K] if ``stacked``; strided in some way if ``views``."""
    shape: tuple[int, ...] = draw(st.tuples(DIMS, DIMS))
    if stacked and draw(st.booleans()):
        shape = (draw(st.integers(0, 3)), *shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weight = pattern(draw(st.sampled_from(KINDS)), shape, rng)
    dtype = draw(DTYPES)
    weight = weight.clamp(-65504, 65504).half() if dtype == torch.float16 else weight.to(dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](weight) if views else weight


def every_pair_of_mantissas() -> torch.Tensor:
    """BF16 [128, 128·128]: block i has an amax of mantissa i, and every BF16 from there to 2^-24 of it, both signs."""
    mantissas = torch.arange(128, 256, dtype=torch.float32)
    smaller = torch.cat([mantissas * 2.0**-exponent for exponent in range(24)])
    blocks = torch.zeros(128, 128 * 128)
    for block, amax in zip(blocks, mantissas, strict=True):
        values = smaller[smaller <= amax]
        block[: 2 * values.numel()] = torch.cat([values, -values])
        block[-2:] = torch.tensor([amax, -0.0])
    return blocks.view(128, 128, 128).transpose(0, 1).reshape(128, -1).to(torch.bfloat16)
