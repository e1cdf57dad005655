"""The formats that weights are quantized to: names, dtypes and shapes of codes and scales, and their references."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rollout_service.protocol.tensors import WeightFormatName
from rollout_service.quant import blockwise, channelwise


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored as codes of its shape and fp32 scales."""

    name: WeightFormatName
    codes: Literal["float8_e4m3fn", "int8"]
    """Dtype of the codes, which stand under the weight's own name."""
    scale_suffix: str
    """Appended to the weight's name for its scales."""
    scale_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Of the scales of a weight [N, K] or [E, N, K]."""
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """The reference: a weight, and its name for errors, to codes and scales; raises QuantizationError."""
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Codes and scales to what they stand for, fp32."""
    largest_code: float
    in_blocks: bool
    """Whether 128×128 weights share a scale, so that a GPU's shard must be a whole number of them; else a row's do."""

    @property
    def dtype(self) -> torch.dtype:
        """torch's, of the codes."""
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
"""What no tensor but codes has."""


_CODES = frozenset(made.dtype for made in WEIGHT_FORMATS.values())


def is_codes(tensor: torch.Tensor) -> bool:
    """Whether these are codes of any format."""
    return tensor.dtype in _CODES
