"""Tensors of a weight version, as engines load them."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, Field

StoredDtype = Literal["bfloat16", "float32", "float8_e4m3fn", "int8"]
STORED_DTYPE_BYTES: dict[StoredDtype, int] = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}

AnnouncedShape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...], Field(max_length=64)]
"""Shape of a tensor to come. The bounds are those of torch and numpy; without them, multiplying takes hours."""

WeightFormatName = Literal["fp8_block", "fp8_channel", "int8_channel"]
"""Formats of quantized matrices: see ``quant/formats.py``."""
QuantWeights = Literal[WeightFormatName, "none"]
"""Values of ``quant.weights``; ``none``: BF16."""


class TensorSlot(BaseModel, frozen=True):
    """Name, dtype and shape of a tensor to be written, as engines load it."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * STORED_DTYPE_BYTES[self.dtype]
