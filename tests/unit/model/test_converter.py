"""A trainer's table and its converted tensors are the same, whatever their shapes."""

import pytest
import torch

from rollout_service.model.convert import Converter
from rollout_service.protocol.upload import TrainerRecipe, UploadTensor

NAME = "layer.weight"


@pytest.mark.parametrize("shape", [(), (5,), (2, 128, 128), (130, 3), (0, 128), (128, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel", "int8_channel"])
def test_tensors_are_those_of_the_table_for_any_shape(weights, shape):
    converter = Converter(TrainerRecipe(weights=weights, quantized=(NAME,)), device="cpu")
    table = converter.table([UploadTensor(name=NAME, dtype="float32", shape=shape)])
    made = converter.convert([(NAME, torch.ones(shape))])
    assert [(each.name, f"torch.{each.dtype}", each.shape) for each in table] == [
        (name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in made
    ]
