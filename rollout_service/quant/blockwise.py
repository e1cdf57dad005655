"""Blockwise FP8 quantization of a weight: the torch reference, which is the specification.

For each 128×128 block of the BF16-rounded weight, padded with zeros at ragged edges:

    s = max(max|w|, 1e-12) / 448        (fp32)
    q = RNE(clamp(w / s, -448, 448))    (E4M3, IEEE division)

and the engine computes with w ≈ q·s. The scale is stored under ``<name>_scale_inv``: the name is the checkpoint
format's (DeepSeek-V3), although it is the factor a code is multiplied by.
"""

import torch

from rollout_service.errors import QuantizationError

BLOCK = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12
CODES = torch.float8_e4m3fn


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a weight ``[N, K]``: ``[⌈N/128⌉, ⌈K/128⌉]``."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize_blockwise(weight: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``weight`` [N, K] (BF16, FP16 or FP32) to codes e4m3 [N, K] and scales fp32 [⌈N/128⌉, ⌈K/128⌉].

    Raises QuantizationError, naming ``name`` and the first index, if the weight holds NaN or infinity.
    """
    if weight.dim() != 2:
        raise QuantizationError(
            f"{name} has {weight.dim()} dimensions; blockwise FP8 takes matrices: skip it in the recipe"
        )
    require_finite(weight, name)
    rows, columns = weight.shape
    grid = scale_shape((rows, columns))
    padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight.to(torch.bfloat16).float()
    blocks = padded.view(grid[0], BLOCK, grid[1], BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_(min=AMAX_FLOOR) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(CODES)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scales


def dequantize_blockwise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``q·s`` in fp32 [N, K] from codes e4m3 [N, K] and scales fp32 [⌈N/128⌉, ⌈K/128⌉]."""
    rows, columns = codes.shape
    if rows % BLOCK == 0 and columns % BLOCK == 0:
        blocks = codes.float().view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
        return blocks.mul_(scales[:, None, :, None]).view(rows, columns)
    per_weight = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * per_weight


def require_finite(weight: torch.Tensor, name: str) -> None:
    """Raise QuantizationError with the first index of ``weight`` that is NaN or infinite after rounding to BF16."""
    finite = torch.isfinite(weight.to(torch.bfloat16))
    if not bool(finite.all()):
        index = tuple((~finite).nonzero()[0].tolist())
        raise QuantizationError(
            f"{name}{list(index)} is {weight[index].item()} (in BF16: {weight[index].to(torch.bfloat16).item()}): "
            "the version is refused; the one before stays live",
            {"tensor": name, "index": list(index), "count": int((~finite).sum())},
        )
