"""Blockwise W8A8 mixture of experts on the CPU, with the numerics of the GPU kernels.

vLLM's own CPU kernels need AMX and leave activations in BF16 (W8A16). Here, as in vLLM's Triton kernel, the input of
each of an expert's two products is rounded to E4M3 with one scale per 1×128, products are summed in fp32, and what
lies between them is BF16. The decoded weights cost four bytes a parameter beside the one of the codes: for small
models only.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from rollout_service.engine.cpu.block_linear import decode_activations
from rollout_service.quant.blockwise import BLOCK, dequantize_blockwise
from rollout_service.vllm_internals import (
    Fp8Config,
    Fp8MoEMethod,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    GroupShape,
    MoEActivation,
    QuantFP8,
    RoutedExperts,
)

# vLLM's own CPU kernels cut a BF16 result off instead of rounding it where the processor has no BF16 instructions
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: silu,
    MoEActivation.GELU: gelu,
    MoEActivation.GELU_TANH: partial(gelu, approximate="tanh"),
}


class CpuBlockMoEMethod(Fp8MoEMethod):
    """vLLM's block-FP8 experts: it creates and loads their parameters, this computes with them."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        """Raises ValueError for experts of a kind that is not computed here."""
        # not Fp8MoEMethod's own: it selects a backend, and finds none on a CPU without AMX
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        _require_computable(layer, quant_config)
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
        """False: the decoded weights would not follow experts that move."""
        return False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Nothing for vLLM's own kernels to know."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Decode w13 to fp32 [E, 2·I, H] and w2 to fp32 [E, H, I]; codes and scales stay as they were loaded.

        Called at every load of the layer, so the decoded weights are never of another version than the codes.
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
        """BF16 [M, H] from ``x`` BF16 [M, H] and each token's experts, weights and ids [M, top_k].

        With expert parallelism it is this rank's part of the sum, which vLLM adds up over ranks. Shared experts are not
        added: vLLM runs them before, because this method reports no kernel that overlaps them.
        """
        inputs = self._through_e4m3(x)
        output = torch.zeros_like(inputs)
        chosen = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        for expert in chosen.unique().tolist():
            if expert < 0:  # another rank has it
                continue
            tokens, choice = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (inputs[tokens] @ self.w13[expert].T).to(x.dtype).float().chunk(2, dim=-1)
            hidden = (_ACTIVATIONS[layer.activation](gate) * up).to(x.dtype)
            expert_output = self._through_e4m3(hidden) @ self.w2[expert].T
            output.index_add_(0, tokens, expert_output * topk_weights[tokens, choice].float().unsqueeze(-1))
        return output.to(x.dtype)

    def _through_e4m3(self, x: torch.Tensor) -> torch.Tensor:
        return decode_activations(*self._quantize(x))


def _require_computable(layer: RoutedExperts, quant_config: Fp8Config) -> None:
    refused = {
        f"weight blocks {quant_config.weight_block_size}": quant_config.weight_block_size != [BLOCK, BLOCK],
        f"activation {layer.activation.value}": layer.activation not in _ACTIVATIONS,
        "biases": layer.moe_config.has_bias,
        "a clamped SwiGLU": layer.swiglu_limit is not None,
        "router weights on the input": layer.apply_router_weight_on_input,
    }
    found = [what for what, present in refused.items() if present]
    if found:
        raise ValueError(
            f"{layer.layer_name}: experts with {', '.join(found)} are not computed in FP8 on the CPU: serve the model "
            f"on a GPU, or leave its experts in BF16 through quant.skip"
        )
