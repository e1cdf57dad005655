"""The quantization configurations of CPU engines, registered with vLLM under separate names.

A GPU engine gets vLLM's ``quant_method: fp8``; a CPU engine gets one of these. vLLM's FP8 kernels for the CPU need AMX
and do not round activations, so they are never used.
"""

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rollout_service.compat.vllm_internals import (
    Attention,
    BaseKVCacheMethod,
    Fp8Config,
    LinearBase,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
    WeightsMapper,
    forget_kernel,
    is_layer_skipped,
)
from rollout_service.engine.bf16_config import Bf16Config
from rollout_service.engine.cpu.block_linear import CpuBlockLinearMethod
from rollout_service.engine.cpu.block_moe import CpuBlockMoEMethod
from rollout_service.engine.cpu.channel_linear import CpuChannelLinearMethod
from rollout_service.engine.cpu.channel_moe import CpuChannelMoEMethod
from rollout_service.engine.plugin import CPU_BF16, CPU_BLOCK_FP8, CPU_CHANNEL
from rollout_service.quant.formats import WEIGHT_FORMATS, WeightFormat


class CpuMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's BF16 experts on the CPU, packed again at every load, with support for expert parallelism.

    vLLM 0.32 packs the experts at the first load only. An update would then put unpacked weights where the kernel reads
    packed ones, without an error. Its kernel also ignores the expert map: it would take a global expert id for a local
    index.
    """

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Pack the loaded weights."""
        forget_kernel(self)
        super().process_weights_after_loading(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return BF16 [M, H] from ``x`` BF16 [M, H] and each token's expert weights and ids [M, top_k].

        Experts of other ranks are replaced by this rank's first expert with weight 0. vLLM adds up the ranks' outputs.
        """
        if layer.expert_map is not None:
            held = layer.expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(held < 0, 0)
            topk_ids = held.clamp(min=0).to(topk_ids.dtype)
        output: torch.Tensor = super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return output


@register_quantization_config(CPU_BLOCK_FP8)
class CpuBlockFp8Config(Fp8Config):
    """vLLM's serialized block-FP8 format, computed as W8A8 on the CPU. Skipped layers stay in BF16."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that loads and computes ``layer``. None for embeddings and the output head."""
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            return super().get_quant_method(layer, prefix)  # for the KV cache's loadable scales
        skipped = is_layer_skipped(
            prefix=prefix, ignored_layers=self.ignored_layers, fused_mapping=self.packed_modules_mapping
        )
        if skipped:
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
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            return super().get_quant_method(layer, prefix)
        skipped = is_layer_skipped(
            prefix=prefix, ignored_layers=self.ignored_layers, fused_mapping=self.packed_modules_mapping
        )
        if skipped:
            return _unquantized(layer)
        if isinstance(layer, RoutedExperts):
            return CpuChannelMoEMethod(self.form, layer)
        return CpuChannelLinearMethod(self.form)


def _unquantized(layer: LinearBase | RoutedExperts) -> QuantizeMethodBase:
    return CpuMoEMethod(layer.moe_config) if isinstance(layer, RoutedExperts) else UnquantizedLinearMethod()
