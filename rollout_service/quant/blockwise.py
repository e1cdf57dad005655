"""Blockwise FP8 quantization of a weight: the torch reference, which is the specification.

For each 128×128 block of the BF16-rounded weight, padded with zeros at ragged edges:

    s = max(max|w|, 1e-12) / 448        (fp32; rounded up to a power of two if asked)
    q = RNE(clamp(w / s, -448, 448))    (E4M3, IEEE division)

The engine computes with w ≈ q·s. The scale is stored under ``<name>_scale_inv``. This is the name in the checkpoint
format (DeepSeek-V3), although codes are multiplied by the scale.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.errors import QuantizationError
from rollout_service.runtime.threads import STRETCH_BYTES, in_threads, stretches

BLOCK = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12
CODES = torch.float8_e4m3fn
_EXPONENT_BF16 = 0x7F80
"""All ones: NaN or infinity."""
_PIECE_BYTES = 1 << 18
"""Bytes that are checked at a time: they fit into a core's cache."""
_SMALL_BYTES = 4 << 20
"""Size in bytes below which tensors are concatenated before a check: on a GPU the copy is faster than another kernel
launch."""


@functools.lru_cache(1024)
def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``[N, K]``: ``[⌈N/128⌉, ⌈K/128⌉]``; of stacked experts ``[E, …]``
    likewise."""
    *experts, rows, columns = shape
    return (*experts, -(-rows // BLOCK), -(-columns // BLOCK))


def quantize_blockwise(
    weight: torch.Tensor, name: str = "weight", *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``weight`` to codes e4m3 of its shape and scales fp32 of ``scale_shape``, on its device.

    ``weight``: [N, K], or [E, N, K] for stacked experts, each by itself; BF16, FP16 or FP32; any strides, any size.
    ``power_of_two``: round scales up to powers of two (which Blackwell's block-scaled products need).

    Raises QuantizationError, with ``name`` and the first index, if the weight holds NaN or infinity.
    """
    if weight.dim() not in (2, 3):
        raise QuantizationError(
            f"{name} has {weight.dim()} dimensions; blockwise FP8 takes matrices: add it to quant.skip"
        )
    require_finite(weight, name)
    blocks = _padded_blocks(weight)
    scales = block_scales(blocks.abs().amax(dim=(-3, -1)), power_of_two=power_of_two)
    codes = (blocks / scales[..., :, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(CODES)
    return _without_padding(codes, weight.shape), scales


def block_scales(amax: torch.Tensor, *, power_of_two: bool) -> torch.Tensor:
    """Return scales fp32 from the blocks' largest magnitudes fp32, of any shape."""
    # divide by a tensor: for a Python number, torch on CUDA multiplies with the reciprocal, which changes the last bit
    scales = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)
    if not power_of_two:
        return scales
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def dequantize_blockwise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``q·s`` in fp32 from codes e4m3 [N, K] or [E, N, K] and scales fp32 of their ``scale_shape``."""
    blocks = _padded_blocks(codes).mul_(scales[..., :, None, :, None])
    return _without_padding(blocks, codes.shape)


def require_finite(weight: torch.Tensor, name: str) -> None:
    """Raise QuantizationError with the first index of ``weight`` that is NaN or infinite after rounding to BF16."""
    if _is_surely_finite(weight):
        return
    finite = torch.isfinite(weight.to(torch.bfloat16))
    if not bool(finite.all()):
        index = tuple((~finite).nonzero()[0].tolist())
        raise QuantizationError(
            f"{name}{list(index)} is {weight[index].item()} (in BF16: {weight[index].to(torch.bfloat16).item()}): "
            "the version is refused; the one before stays live",
            {"tensor": name, "index": list(index), "count": int((~finite).sum())},
        )


def _is_surely_finite(weight: torch.Tensor) -> bool:
    """Return True if a fast check finds the weight finite; False if it is not, or without a fast check."""
    if weight.is_cuda:
        return bool(are_finite([weight]))
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return False
    numbers = weight.detach().reshape(-1).view(torch.int16).numpy()
    pieces = stretches(numbers.size, STRETCH_BYTES // numbers.itemsize)
    return not any(in_threads(lambda piece: any_has_all_bits(numbers[piece], _EXPONENT_BF16), pieces))


def are_finite(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Check that all numbers are finite after rounding to BF16: bool [] on their device, without a synchronization.

    One kernel for each large tensor, and a few for all others: rounding is monotonic, and ``aminmax`` propagates NaN.
    """
    extremes = [
        extreme.to(torch.bfloat16) for numbers in concatenate_small(weights) for extreme in torch.aminmax(numbers)
    ]
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=weights[0].device if weights else None)
    return torch.stack(extremes).abs_().amax() < math.inf  # false for NaN


def concatenate_small(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors' numbers, in one dimension. Small tensors of one dtype are concatenated, so that thousands of
    tensors on a GPU are checked with a few kernels."""
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for weight in tensors:
        if weight.nbytes > _SMALL_BYTES:
            yield weight.detach().reshape(-1)
        elif weight.numel():
            small.setdefault(weight.dtype, []).append(weight.detach().reshape(-1))
    for numbers in small.values():
        yield torch.cat(numbers) if len(numbers) > 1 else numbers[0]


def any_has_all_bits(numbers: npt.NDArray[np.integer], bits: int) -> bool:
    """Return True if any of these integers, in one dimension, has all of ``bits`` set."""
    # 20 times as fast as torch, whose threads wait for each other
    step = _PIECE_BYTES // numbers.itemsize
    pieces = (numbers[start : start + step] for start in range(0, numbers.size, step))
    return any((piece & bits).max() == bits for piece in pieces)


def _padded_blocks(matrices: torch.Tensor) -> torch.Tensor:
    """Return fp32 [..., ⌈N/128⌉, 128, ⌈K/128⌉, 128] of weights (rounded to BF16) or codes, zero-padded; a copy."""
    *experts, rows, columns = matrices.shape
    *_, block_rows, block_columns = scale_shape(tuple(matrices.shape))
    values = matrices.float() if matrices.dtype == CODES else matrices.to(torch.bfloat16).float()
    below, right = block_rows * BLOCK - rows, block_columns * BLOCK - columns
    if below or right:
        values = torch.nn.functional.pad(values, (0, right, 0, below))
    return values.reshape(*experts, block_rows, BLOCK, block_columns, BLOCK)


def _without_padding(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    *experts, block_rows, _, block_columns, _ = blocks.shape
    whole = blocks.reshape(*experts, block_rows * BLOCK, block_columns * BLOCK)
    return whole[..., : shape[-2], : shape[-1]].contiguous()
