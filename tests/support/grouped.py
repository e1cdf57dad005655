"""Runs the grouped kernel, on whatever device the weights are, beside the reference."""

from collections.abc import Sequence

import torch

from rollout_service.quant.cuda import GroupedQuantization
from rollout_service.quant.formats import FP8_BLOCK, WeightFormat

POISON = 0x55


def outputs(
    weights: Sequence[torch.Tensor], form: WeightFormat = FP8_BLOCK
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and scales to be written: poisoned, so that what is left unwritten shows."""
    codes = [torch.empty(w.shape, dtype=torch.uint8, device=w.device).fill_(POISON).view(form.dtype) for w in weights]
    return codes, [torch.full(form.scale_shape(tuple(w.shape)), -1.0, device=w.device) for w in weights]


def assert_bytes_of_the_reference(
    weights: Sequence[torch.Tensor], *, power_of_two: bool = False, form: WeightFormat = FP8_BLOCK
) -> GroupedQuantization:
    """Quantize all at once; compare with the reference, on the weights' device and on the CPU."""
    codes, scales = outputs(weights, form)
    prepared = GroupedQuantization(weights, codes, scales, power_of_two=power_of_two, form=form)
    prepared.run()
    for weight, code, scale in zip(weights, codes, scales, strict=True):
        for source in {weight.device.type: weight, "cpu": weight.cpu()}.values():
            options = {"power_of_two": power_of_two} if form.in_blocks else {}
            expected_codes, expected_scales = form.quantize(source, **options)
            where = f"{list(weight.shape)} {weight.dtype} strides {weight.stride()}, reference on {source.device}"
            assert torch.equal(scale.to(source.device), expected_scales), where
            assert torch.equal(code.to(source.device).view(torch.uint8), expected_codes.view(torch.uint8)), where
    return prepared
