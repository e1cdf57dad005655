"""Tensors of a weight version, as engines load them."""

import math
from typing import Literal

from pydantic import BaseModel

StoredDtype = Literal["bfloat16", "float32", "float8_e4m3fn", "int8"]
STORED_DTYPE_BYTES: dict[StoredDtype, int] = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}

WeightFormatName = Literal["fp8_block", "fp8_channel", "int8_channel"]
"""What matrices are quantized to: ``quant/formats.py``."""
QuantWeights = Literal[WeightFormatName, "none"]
"""``quant.weights``; ``none``: BF16."""


class TensorSlot(BaseModel, frozen=True):
    """A tensor that will be written: name, dtype and shape as the engines load it."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * STORED_DTYPE_BYTES[self.dtype]
