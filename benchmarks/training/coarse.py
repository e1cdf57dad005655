"""A quantizer that is coarse on purpose, for ``tis_ablation``: a few levels in 128×128 blocks, as E4M3 codes.

It stands for a mismatch that is much larger than FP8's own. The service's quantizer is never this: what it makes is
pushed, as a trainer may push codes and scales that it made itself, and the service checks that they are valid, not how
good they are.
"""

from collections.abc import Collection, Mapping

import torch

from rollout_service.model.quant_plan import SCALE_SUFFIX
from rollout_service.quant.blockwise import CODES, E4M3_MAX, dequantize_blockwise, quantize_blockwise


def coarse_weights(
    weights: Mapping[str, torch.Tensor], quantized: Collection[str], levels: int
) -> dict[str, torch.Tensor]:
    """A version to push: coarse codes and their scales for the names in ``quantized``, all other tensors as they are.

    ``quantized``: what the service says it quantizes (``TrainerRecipe.quantized``). Raises what ``quantize_coarsely``
    raises.
    """
    version: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name in quantized:
            version[name], version[name + SCALE_SUFFIX] = quantize_coarsely(weight, levels, name)
        else:
            version[name] = weight
    return version


def quantize_coarsely(weight: torch.Tensor, levels: int, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as one of ``levels`` integers, odd: codes e4m3 [N, K] and scales fp32 [⌈N/128⌉, ⌈K/128⌉].

    With n = (levels − 1) / 2, a block's scale is max|w| / n and its codes are round(w / scale), −n to n, which E4M3
    holds exactly. Raises QuantizationError for NaN and infinity.
    """
    largest = levels // 2
    _, fine_scales = quantize_blockwise(weight, name)  # max|w| / 448
    scales = fine_scales * (E4M3_MAX / largest)
    scale_of_each = dequantize_blockwise(torch.ones(weight.shape).to(CODES), scales)
    integers = (weight.float() / scale_of_each).round().clamp(-largest, largest)
    return integers.to(CODES), scales
