"""Blockwise W8A8 mixture of experts on the CPU: ``experts.py`` with blockwise FP8 weights and 1×128 activations."""

import torch

from rollout_service.compat.vllm_internals import (
    Fp8Config,
    Fp8MoEMethod,
    FusedMoEMethodBase,
    GroupShape,
    QuantFP8,
    RoutedExperts,
)
from rollout_service.engine.cpu.block_linear import decode_activations
from rollout_service.engine.cpu.experts import CpuExperts, require_computable
from rollout_service.quant.blockwise import BLOCK, dequantize_blockwise


class CpuBlockMoEMethod(CpuExperts, Fp8MoEMethod):
    """Block-FP8 experts. vLLM's class creates and loads their parameters."""

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

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Decode w13 to fp32 [E, 2·I, H] and w2 to fp32 [E, H, I]. The loaded codes and scales stay unchanged.

        Runs at every load of the layer, so that decoded weights and codes always have the same version.
        """
        self.w13 = dequantize_blockwise(layer.w13_weight.data, layer.w13_weight_scale_inv.data)
        self.w2 = dequantize_blockwise(layer.w2_weight.data, layer.w2_weight_scale_inv.data)

    def through_codes(self, x: torch.Tensor) -> torch.Tensor:
        """Return an input [M, K] rounded through E4M3 in groups of 1×128."""
        return decode_activations(*self._quantize(x))
