"""Blockwise W8A8 matrix product on the CPU, with the numerics of the GPU kernels.

vLLM's own CPU kernels need AMX and leave activations in BF16 (W8A16), so their logprobs say nothing about a GPU's.
This one quantizes activations 1×128 like CUTLASS and DeepGEMM do and multiplies in fp32: only the speed is emulated.
"""

import torch
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig
from vllm.platforms import current_platform

from rollout_service.quant.blockwise import BLOCK, dequantize_blockwise


class CpuBlockScaledMM(Fp8BlockScaledMMLinearKernel):
    """``y = (A·As) @ (B·Bs)ᵀ`` in fp32; the base class has quantized the activations to ``A``, ``As`` already.

    vLLM makes one instance a layer and calls ``process_weights_after_loading`` at every load of the layer, so ``B·Bs``
    is kept there: decoding FP8 on a CPU takes 30 times longer than the product itself.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Any CPU."""
        return (True, None) if current_platform.is_cpu() else (False, "requires the CPU platform")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Blocks of 128×128 with dynamic activations."""
        group = config.weight_quant_key.scale.group_shape
        if (group.row, group.col) != (BLOCK, BLOCK):
            return False, f"weight blocks must be {BLOCK}×{BLOCK}, not {group.row}×{group.col}"
        return super().can_implement(config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the layer's weight, fp32 [N, K], beside the codes and scales that stay as they were loaded."""
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        self._weight = dequantize_blockwise(params.weight.data, params.block_scale.data)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """``A`` e4m3 [M, K], ``As`` fp32 [M, K/128], ``B`` e4m3 [N, K], ``Bs`` fp32 [⌈N/128⌉, K/128] → fp32 [M, N]."""
        activations = (A.float().view(*As.shape, BLOCK) * As.unsqueeze(-1)).view(A.shape)
        return activations @ self._weight.T
