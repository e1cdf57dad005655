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
        return cls.NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        return cls()
