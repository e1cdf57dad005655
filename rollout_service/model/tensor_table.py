"""Compare a trainer's tensor table with that of the served model."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from rollout_service.protocol.experts import ExpertNaming, pieces
from rollout_service.protocol.upload import UploadTensor
from rollout_service.quant.formats import CODE_DTYPES, FP8_BLOCK, WeightFormat

SCALES = "float32"
Shape = tuple[int, ...]


class Expected(NamedTuple):
    """The allowed contents of a table."""

    shapes: Mapping[str, Shape]
    """Tensors by their names on disk."""
    in_memory: Mapping[str, Shape]
    """Other names and shapes under which trainers hold some tensors, such as stacked experts."""
    experts: ExpertNaming | None
    quantized: Set[str]
    """Names in ``shapes`` that may come as codes and scales."""
    form: WeightFormat = FP8_BLOCK
    """Format of those codes and scales."""


def differences(tensors: tuple[UploadTensor, ...], expected: Expected) -> dict[str, list[str]]:
    """Return all errors in ``tensors``, by kind of error; every list is empty if there are none."""
    known = [tensor for tensor in tensors if _expected_shape(tensor.name, expected) is not None]
    brought = Counter(name for tensor in known for name in _on_disk(tensor.name, expected))
    codes = {tensor.name for tensor in known if tensor.dtype == expected.form.codes}
    suffix = expected.form.scale_suffix
    scaled = {name for name in expected.quantized if name + suffix in brought}
    return {
        "duplicate": sorted(name for name, times in brought.items() if times > 1),
        "unknown": sorted({tensor.name for tensor in tensors} - {tensor.name for tensor in known}),
        "missing": sorted(
            (expected.shapes.keys() - brought.keys())
            | {name + suffix for name in (codes & expected.quantized) - scaled}
        ),
        "wrong_shape": [
            f"{tensor.name} is {list(tensor.shape)}, the model's is {list(shape)}"
            for tensor in known
            if (shape := _expected_shape(tensor.name, expected)) is not None and shape != tensor.shape
        ],
        "wrong_dtype": [line for tensor in known for line in _wrong_dtype(tensor, codes, expected)],
    }


def _expected_shape(name: str, expected: Expected) -> Shape | None:
    if name in expected.shapes:
        return expected.shapes[name]
    if (weight := _weight_of(name, expected)) is not None:
        return expected.form.scale_shape(expected.shapes[weight])
    return expected.in_memory.get(name)


def _weight_of(scales: str, expected: Expected) -> str | None:
    weight = scales.removesuffix(expected.form.scale_suffix)
    return weight if weight != scales and weight in expected.quantized else None


def _on_disk(name: str, expected: Expected) -> Iterable[str]:
    if name in expected.in_memory:
        return [piece.name for piece in pieces(name, expected.in_memory[name], expected.experts)]
    return [name]


def _wrong_dtype(tensor: UploadTensor, codes: Set[str], expected: Expected) -> Iterable[str]:
    weight, sent = _weight_of(tensor.name, expected), tensor.dtype
    if weight is not None and sent != SCALES:
        yield f"{tensor.name} is {sent}, {'block' if expected.form.in_blocks else 'channel'} scales are {SCALES}"
    if weight is not None and weight not in codes:
        yield f"{tensor.name} is of no use: {weight} has not come as {expected.form.codes}"
    if sent in CODE_DTYPES and tensor.name in expected.in_memory:
        yield f"{tensor.name} is {sent}: send codes and scales under the names on disk, each expert's by themselves"
    elif sent in CODE_DTYPES and weight is None and tensor.name not in expected.quantized:
        yield f"{tensor.name} is {sent}, but it is not quantized in this service: send it in bfloat16"
    elif sent in CODE_DTYPES and weight is None and sent != expected.form.codes:
        yield f"{tensor.name} is {sent}, and codes are {expected.form.codes} in this service"
