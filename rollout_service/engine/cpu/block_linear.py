"""Blockwise W8A8 linear layers on the CPU, with the numerics of the GPU kernels.

vLLM's own CPU kernels need AMX and keep activations in BF16 (W8A16), so their logprobs differ from a GPU's. This one
quantizes activations in 1×128 groups like CUTLASS and DeepGEMM, and multiplies in fp32. Only the speed differs. The
decoded weights take four bytes per parameter in addition to the codes: for small models only.
"""

import torch
from vllm.platforms import current_platform

from rollout_service.compat.vllm_internals import (
    BlockQuantScaleParameter,
    Fp8BlockScaledMMLinearKernel,
    Fp8LinearMethod,
    FP8ScaledMMLinearLayerConfig,
    LinearBase,
    block_weight,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    register_weight_loader_v2_supported_method,
    validate_fp8_block_shape,
)
from rollout_service.quant.blockwise import BLOCK, dequantize_blockwise


class CpuBlockScaledMM(Fp8BlockScaledMMLinearKernel):
    """Computes ``y = (A·As) @ (B·Bs)ᵀ`` in fp32. The base class has quantized the activations to ``A`` and ``As``.

    There is one instance per layer, and ``process_weights_after_loading`` runs at every load of the layer. It stores
    ``B·Bs``, because decoding FP8 on a CPU takes 30 times longer than the product.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return True on any CPU."""
        return (True, None) if current_platform.is_cpu() else (False, "requires the CPU platform")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Return True for blocks of 128×128 with dynamic activations."""
        group = config.weight_quant_key.scale.group_shape
        if (group.row, group.col) != (BLOCK, BLOCK):
            return False, f"weight blocks must be {BLOCK}×{BLOCK}, not {group.row}×{group.col}"
        return super().can_implement(config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the layer's weight to fp32 [N, K]. The loaded codes and scales stay unchanged."""
        super().process_weights_after_loading(layer)
        self.weight = dequantize_blockwise(*block_weight(self, layer))

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Compute ``A`` e4m3 [M, K], ``As`` fp32 [M, K/128], ``B`` e4m3 [N, K], ``Bs`` fp32 [⌈N/128⌉, K/128] → fp32 [M,
        N]."""
        return decode_activations(A, As) @ self.weight.T


def decode_activations(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``q·s`` in fp32 [M, K] from codes e4m3 [M, K] and scales fp32 [M, K/128]."""
    return (codes.float().view(*scales.shape, BLOCK) * scales.unsqueeze(-1)).view(codes.shape)


# vLLM chooses a layer's weight loader by the class name of its method
@register_weight_loader_v2_supported_method
class CpuBlockLinearMethod(Fp8LinearMethod):
    """vLLM's block-FP8 linear method with ``CpuBlockScaledMM`` for the product.

    The base class looks for a kernel in ``create_weights``, and finds none on a CPU without AMX.
    """

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Register ``weight`` e4m3 [N, K] and ``weight_scale_inv`` fp32 [⌈N/128⌉, ⌈K/128⌉] of this rank.

        Raises ValueError if a shard does not divide into blocks.
        """
        block, loader = self.weight_block_size, extra_weight_attrs.get("weight_loader")
        validate_fp8_block_shape(
            layer, input_size, output_size, input_size_per_partition, output_partition_sizes, block
        )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        layer.weight_block_size = block
        weight = create_fp8_weight_parameter(layer.output_size_per_partition, input_size_per_partition, loader)
        scales = create_fp8_scale_parameter(
            BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, block, loader
        )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scales)
        self.fp8_linear = CpuBlockScaledMM(
            FP8ScaledMMLinearLayerConfig(
                weight_quant_key=self.weight_quant_key,
                activation_quant_key=self.activation_quant_key,
                weight_shape=tuple(weight.shape),
                input_dtype=self.input_dtype,
                out_dtype=self.out_dtype,
            )
        )
