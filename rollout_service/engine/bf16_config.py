"""The base of our quantization configurations in vLLM: computation in BF16, no options."""

from typing import ClassVar, Self

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class Bf16Config(QuantizationConfig):
    """A configuration that reads nothing but the model's config.json. A subclass has ``NAME`` and the methods."""

    NAME: ClassVar[str]
    """Name that it is registered under."""

    @classmethod
    def get_name(cls) -> str:
        """Return the registered name."""
        return cls.NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return BF16, the compute dtype of all engines."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: no GPU is required."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return an empty list: no files besides the model's config.json are read."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        """Return a new object: there are no options."""
        return cls()
