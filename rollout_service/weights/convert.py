"""A trainer's tensor becomes what the engines load: BF16, or FP8 codes and scales. Done once per version."""

from collections.abc import Iterable

import torch

from rollout_service.quant.blockwise import quantize_blockwise, require_finite, scale_shape
from rollout_service.quant.recipe import SCALE_SUFFIX, QuantPlan
from rollout_service.weights.served_model import ServedModel
from rollout_service.weights.writer import TensorSlot, VersionWriter


def version_slots(model: ServedModel, plan: QuantPlan) -> Iterable[TensorSlot]:
    """Every tensor of a version, in the order they are stored: that of the model, so a layer's parts lie together.

    vLLM's reload buffers a fused layer until all its parts have come; this order keeps one layer open at a time.
    """
    for name, shape in model.shapes.items():
        if name not in plan.quantized:
            yield TensorSlot(name=name, dtype="bfloat16", shape=shape)
            continue
        rows, columns = shape
        yield TensorSlot(name=name, dtype="float8_e4m3fn", shape=shape)
        yield TensorSlot(name=name + SCALE_SUFFIX, dtype="float32", shape=scale_shape((rows, columns)))


def store(name: str, tensor: torch.Tensor, plan: QuantPlan, writer: VersionWriter) -> None:
    """Convert one tensor and write it. Raises QuantizationError on NaN or infinity."""
    if name in plan.quantized:
        codes, scales = quantize_blockwise(tensor, name)
        writer.write(name, tensor_bytes(codes))
        writer.write(name + SCALE_SUFFIX, tensor_bytes(scales))
        return
    require_finite(tensor, name)
    writer.write(name, tensor_bytes(tensor.to(torch.bfloat16)))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major, without a copy where it is contiguous already."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
