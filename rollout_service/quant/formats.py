"""Formats of quantized weights: names, dtypes and shapes of codes and scales, and their reference implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rollout_service.protocol.tensors import WeightFormatName
from rollout_service.quant import blockwise, channelwise


@dataclass(frozen=True)
class WeightFormat:
    """A format that stores a matrix as codes of its shape and fp32 scales."""

    name: WeightFormatName
    codes: Literal["float8_e4m3fn", "int8"]
    """Dtype of the codes, which are stored under the weight's own name."""
    scale_suffix: str
    """Suffix of the weight's name for its scales."""
    scale_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Returns the shape of the scales of a weight [N, K] or [E, N, K]."""
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Reference implementation: takes a weight and its name for errors, returns codes and scales; raises
    QuantizationError."""
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Dequantizes codes and scales to fp32."""
    largest_code: float
    in_blocks: bool
    """True if 128×128 weights share a scale, so that a GPU's shard must consist of whole blocks; False: each row has a
    scale."""

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's dtype of the codes."""
        made: torch.dtype = getattr(torch, self.codes)
        return made


FP8_BLOCK = WeightFormat(
    name="fp8_block",
    codes="float8_e4m3fn",
    scale_suffix="_scale_inv",
    scale_shape=blockwise.scale_shape,
    quantize=blockwise.quantize_blockwise,
    dequantize=blockwise.dequantize_blockwise,
    largest_code=blockwise.E4M3_MAX,
    in_blocks=True,
)
FP8_CHANNEL = WeightFormat(
    name="fp8_channel",
    codes="float8_e4m3fn",
    scale_suffix="_scale",
    scale_shape=channelwise.scale_shape,
    quantize=partial(channelwise.quantize_channelwise, dtype=torch.float8_e4m3fn),
    dequantize=channelwise.dequantize_channelwise,
    largest_code=blockwise.E4M3_MAX,
    in_blocks=False,
)
INT8_CHANNEL = WeightFormat(
    name="int8_channel",
    codes="int8",
    scale_suffix="_scale",
    scale_shape=channelwise.scale_shape,
    quantize=partial(channelwise.quantize_channelwise, dtype=torch.int8),
    dequantize=channelwise.dequantize_channelwise,
    largest_code=channelwise.INT8_MAX,
    in_blocks=False,
)
WEIGHT_FORMATS = {made.name: made for made in (FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL)}
CODE_DTYPES = frozenset(made.codes for made in WEIGHT_FORMATS.values())
"""Dtypes that only codes have."""


_CODES = frozenset(made.dtype for made in WEIGHT_FORMATS.values())


def is_codes(tensor: torch.Tensor) -> bool:
    """Return True for codes of any format."""
    return tensor.dtype in _CODES
