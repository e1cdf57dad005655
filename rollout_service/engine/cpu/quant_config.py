"""The quantization configurations of CPU engines, registered with vLLM under separate names.

A GPU engine gets vLLM's ``quant_method: fp8``; a CPU engine gets one of these. vLLM's FP8 kernels for the CPU need AMX
and do not round activations, so they are never used.
"""

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from rollout_service.compat.vllm_internals import (
    Attention,
    BaseKVCacheMethod,
    Fp8Config,
    LinearBase,
    RoutedExperts,
    UnquantizedLinearMethod,
    WeightsMapper,
    is_layer_skipped,
)
from rollout_service.engine.bf16_config import Bf16Config
from rollout_service.engine.cpu.experts import CpuBlockMoEMethod, CpuChannelMoEMethod, CpuMoEMethod
from rollout_service.engine.cpu.linear import CpuBlockLinearMethod, CpuChannelLinearMethod
from rollout_service.engine.plugin import CPU_BF16, CPU_BLOCK_FP8, CPU_CHANNEL
from rollout_service.quant.formats import WEIGHT_FORMATS, WeightFormat


@register_quantization_config(CPU_BLOCK_FP8)
class CpuBlockFp8Config(Fp8Config):
    """vLLM's serialized block-FP8 format, computed as W8A8 on the CPU. Skipped layers stay in BF16."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that loads and computes ``layer``. None for embeddings and the output head."""
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            return super().get_quant_method(layer, prefix)  # for the KV cache's loadable scales
        if _is_skipped(self, prefix):
            return _unquantized(layer)
        return CpuBlockMoEMethod(self, layer) if isinstance(layer, RoutedExperts) else CpuBlockLinearMethod(self)


@register_quantization_config(CPU_BF16)
class CpuBf16Config(Bf16Config):
    """No quantization of weights. Provides ``CpuMoEMethod`` and the scales of an FP8 KV cache."""

    NAME = CPU_BF16

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that loads and computes ``layer``. None for embeddings and the output head."""
        if isinstance(layer, Attention):
            return BaseKVCacheMethod(self)
        return _unquantized(layer) if isinstance(layer, (LinearBase, RoutedExperts)) else None


@register_quantization_config(CPU_CHANNEL)
class CpuChannelConfig(CpuBf16Config):
    """FP8 or INT8 weights with one scale per output channel, under compressed-tensors' names. Skipped layers stay in
    BF16."""

    NAME = CPU_CHANNEL

    def __init__(self, form: WeightFormat, ignored_layers: list[str]) -> None:
        super().__init__()
        self.form, self.ignored_layers = form, ignored_layers

    @classmethod
    def from_config(cls, config: dict[str, object]) -> "CpuChannelConfig":
        """Create the configuration. ``weights``: see ``quant.weights``. ``modules_to_not_convert``: BF16 modules, by
        vLLM's names."""
        form = WEIGHT_FORMATS[cls.get_from_keys(config, ["weights"])]
        return cls(form, cls.get_from_keys(config, ["modules_to_not_convert"]))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Map the skipped modules' names to vLLM's, for a model whose checkpoint uses other names."""
        self.ignored_layers = hf_to_vllm_mapper.apply_list(self.ignored_layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that loads and computes ``layer``. None for embeddings and the output head."""
        if not isinstance(layer, (LinearBase, RoutedExperts)) or _is_skipped(self, prefix):
            return super().get_quant_method(layer, prefix)
        is_moe = isinstance(layer, RoutedExperts)
        return CpuChannelMoEMethod(self.form, layer) if is_moe else CpuChannelLinearMethod(self.form)


def _is_skipped(config: QuantizationConfig, prefix: str) -> bool:
    mapping = config.packed_modules_mapping
    return is_layer_skipped(prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=mapping)


def _unquantized(layer: LinearBase | RoutedExperts) -> QuantizeMethodBase:
    return CpuMoEMethod(layer.moe_config) if isinstance(layer, RoutedExperts) else UnquantizedLinearMethod()
