"""Blockwise W8A8 mixture of experts on the CPU: ``experts.py`` with blockwise FP8 weights and 1×128 activations."""

import torch

from rollout_service.compat.vllm_internals import (
    Fp8Config,
    Fp8MoEMethod,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    GroupShape,
    QuantFP8,
    RoutedExperts,
)
from rollout_service.engine.cpu.block_linear import decode_activations
from rollout_service.engine.cpu.experts import require_computable, sum_of_experts
from rollout_service.quant.blockwise import BLOCK, dequantize_blockwise


class CpuBlockMoEMethod(Fp8MoEMethod):
    """Block-FP8 experts. The base class creates and loads their parameters; this class computes with them."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        """Create the method. Raises ValueError for unsupported experts."""
        # not Fp8MoEMethod.__init__, which finds no backend on a CPU without AMX
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        block = quant_config.weight_block_size
        require_computable(layer, "FP8", {f"weight blocks {block}": block != [BLOCK, BLOCK]})
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.weight_scale_name = True, "weight_scale_inv"
        self.weight_scale_refine = None
        self._quantize = QuantFP8(static=False, group_shape=GroupShape(1, BLOCK), use_ue8m0=False)

    @property
    def is_monolithic(self) -> bool:
        """False: vLLM's router selects the experts."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """False: the decoded weights would not move with rebalanced experts."""
        return False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Return an empty configuration: vLLM's own kernels are not used."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Decode w13 to fp32 [E, 2·I, H] and w2 to fp32 [E, H, I]. The loaded codes and scales stay unchanged.

        Runs at every load of the layer, so that decoded weights and codes always have the same version.
        """
        self.w13 = dequantize_blockwise(layer.w13_weight.data, layer.w13_weight_scale_inv.data)
        self.w2 = dequantize_blockwise(layer.w2_weight.data, layer.w2_weight_scale_inv.data)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute ``sum_of_experts``. Shared experts are not added, because vLLM runs them before. It does so since
        this method reports no kernel that overlaps them."""
        return sum_of_experts(layer, x, topk_weights, topk_ids, self.w13, self.w2, self._through_e4m3)

    def _through_e4m3(self, x: torch.Tensor) -> torch.Tensor:
        return decode_activations(*self._quantize(x))
