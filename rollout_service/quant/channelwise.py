"""Channelwise quantization of a weight to INT8 or FP8: the torch reference, which is the specification.

For each row of the BF16-rounded weight, which is one output channel, with c = 127 for INT8 and 448 for E4M3:

    s = max(max|w|, 1e-12) / c      (fp32)
    q = RNE(clamp(w / s, -c, c))    (IEEE division; halves to even)

The engine computes with w ≈ q·s. The scale is stored under ``<name>_scale``, as in checkpoints of the
compressed-tensors format ("int-quantized" or "float-quantized", strategy "channel").
"""

import torch

from rollout_service.errors import QuantizationError
from rollout_service.quant.blockwise import AMAX_FLOOR, E4M3_MAX, require_finite

INT8_MAX = 127.0
LARGEST_CODE = {torch.int8: INT8_MAX, torch.float8_e4m3fn: E4M3_MAX}
"""Largest code of each dtype of codes."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``[N, K]``: ``[N, 1]``; of stacked experts ``[E, …]`` likewise."""
    return (*shape[:-1], 1)


def quantize_channelwise(
    weight: torch.Tensor, name: str = "weight", *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``weight`` to codes of its shape and scales fp32 of ``scale_shape``, on its device.

    ``weight``: [N, K], or [E, N, K] for stacked experts; BF16, FP16 or FP32; any strides, any size. ``dtype``: dtype of
    the codes, one of ``LARGEST_CODE``.

    Raises QuantizationError, with ``name`` and the first index, if the weight holds NaN or infinity.
    """
    if weight.dim() not in (2, 3):
        raise QuantizationError(
            f"{name} has {weight.dim()} dimensions; channelwise quantization takes matrices: add it to quant.skip"
        )
    require_finite(weight, name)
    values = weight.to(torch.bfloat16).float()
    amax = values.abs().amax(-1, keepdim=True) if values.shape[-1] else values.new_zeros(scale_shape(values.shape))
    # divide by a tensor: for a Python number, torch on CUDA multiplies with the reciprocal, which changes the last bit
    largest = LARGEST_CODE[dtype]
    scales = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, largest)
    quotients = (values / scales).clamp_(-largest, largest)
    # a cast to E4M3 rounds to nearest even, a cast to integers truncates
    return (quotients if dtype.is_floating_point else quotients.round_()).to(dtype), scales


def dequantize_channelwise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``q·s`` in fp32 from codes int8 or e4m3 [N, K] or [E, N, K] and scales fp32 of their ``scale_shape``."""
    return codes.float() * scales
