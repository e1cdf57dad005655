"""Formats of quantized weights: names, dtypes and shapes of codes and scales, and their reference implementations.

``blockwise.py`` is the specification of blocks. For channels it is ``quantize_channelwise``: for each row of the
BF16-rounded weight, which is one output channel, with c = 127 for INT8 and 448 for E4M3:

    s = max(max|w|, 1e-12) / c      (fp32)
    q = RNE(clamp(w / s, -c, c))    (IEEE division; halves to even)

The engine computes with w ≈ q·s. The scale is stored under ``<name>_scale``, as in checkpoints of the
compressed-tensors format ("int-quantized" or "float-quantized", strategy "channel").
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rollout_service.errors import QuantizationError
from rollout_service.protocol.tensors import WeightFormatName
from rollout_service.quant import blockwise
from rollout_service.quant.blockwise import AMAX_FLOOR, E4M3_MAX, require_finite

INT8_MAX = 127.0


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


def channel_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``[N, K]``: ``[N, 1]``; of stacked experts ``[E, …]`` likewise."""
    return (*shape[:-1], 1)


def quantize_channelwise(
    weight: torch.Tensor, name: str = "weight", *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``weight`` to codes of its shape and scales fp32 of ``channel_scale_shape``, on its device.

    ``weight``: [N, K], or [E, N, K] for stacked experts; BF16, FP16 or FP32; any strides, any size. ``dtype``: dtype of
    the codes, int8 or e4m3.

    Raises QuantizationError, with ``name`` and the first index, if the weight holds NaN or infinity.
    """
    if weight.dim() not in (2, 3):
        raise QuantizationError(
            f"{name} has {weight.dim()} dimensions; channelwise quantization takes matrices: add it to quant.skip"
        )
    require_finite(weight, name)
    values = weight.to(torch.bfloat16).float()
    amax = (
        values.abs().amax(-1, keepdim=True) if values.shape[-1] else values.new_zeros(channel_scale_shape(values.shape))
    )
    # divide by a tensor: for a Python number, torch on CUDA multiplies with the reciprocal, which changes the last bit
    largest = INT8_MAX if dtype == torch.int8 else E4M3_MAX
    scales = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, largest)
    quotients = (values / scales).clamp_(-largest, largest)
    # a cast to E4M3 rounds to nearest even, a cast to integers truncates
    return (quotients if dtype.is_floating_point else quotients.round_()).to(dtype), scales


def dequantize_channelwise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``q·s`` in fp32 from codes int8 or e4m3 [N, K] or [E, N, K] and their scales fp32."""
    return codes.float() * scales


FP8_BLOCK = WeightFormat(
    name="fp8_block",
    codes="float8_e4m3fn",
    scale_suffix="_scale_inv",
    scale_shape=blockwise.scale_shape,
    quantize=blockwise.quantize_blockwise,
    dequantize=blockwise.dequantize_blockwise,
    largest_code=E4M3_MAX,
    in_blocks=True,
)
FP8_CHANNEL = WeightFormat(
    name="fp8_channel",
    codes="float8_e4m3fn",
    scale_suffix="_scale",
    scale_shape=channel_scale_shape,
    quantize=partial(quantize_channelwise, dtype=torch.float8_e4m3fn),
    dequantize=dequantize_channelwise,
    largest_code=E4M3_MAX,
    in_blocks=False,
)
INT8_CHANNEL = WeightFormat(
    name="int8_channel",
    codes="int8",
    scale_suffix="_scale",
    scale_shape=channel_scale_shape,
    quantize=partial(quantize_channelwise, dtype=torch.int8),
    dequantize=dequantize_channelwise,
    largest_code=INT8_MAX,
    in_blocks=False,
)
WEIGHT_FORMATS = {made.name: made for made in (FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL)}
CODE_DTYPES = frozenset(made.codes for made in WEIGHT_FORMATS.values())
"""Dtypes that only codes have."""
_CODES = frozenset(made.dtype for made in WEIGHT_FORMATS.values())


def is_codes(tensor: torch.Tensor) -> bool:
    """Return True for codes of any format."""
    return tensor.dtype in _CODES
