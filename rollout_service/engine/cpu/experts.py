"""Mixtures of experts on the CPU in fp32, with the roundings of the GPU kernels between the products.

vLLM's own CPU kernels need AMX and keep activations in BF16 (W8A16). Here, as in vLLM's Triton kernel, the input of
each of an expert's two products is rounded to its codes. Products are summed in fp32, and the result between them is
BF16. The decoded weights take four bytes per parameter in addition to the codes: for small models only.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from rollout_service.compat.vllm_internals import FusedMoEMethodBase, FusedMoEQuantConfig, MoEActivation, RoutedExperts

# without BF16 instructions, vLLM's own CPU kernels truncate BF16 results instead of rounding them
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: silu,
    MoEActivation.GELU: gelu,
    MoEActivation.GELU_TANH: partial(gelu, approximate="tanh"),
}


class CpuExperts(FusedMoEMethodBase):
    """Computes with decoded weights. A subclass decodes them at every load of the layer."""

    w13: torch.Tensor
    """fp32 [E, 2·I, H]."""
    w2: torch.Tensor
    """fp32 [E, H, I]."""
    through_codes: Callable[[torch.Tensor], torch.Tensor]
    """Rounds an input [M, K] as the kernels do, to fp32."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Return an empty configuration: vLLM's own kernels are not used."""
        return FusedMoEQuantConfig.make()

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

        With expert parallelism the result is this rank's part of the sum, which vLLM adds up over ranks. Shared experts
        are not added, because vLLM runs them before. It does so since this method reports no kernel that overlaps them.
        """
        inputs = self.through_codes(x)
        output = torch.zeros_like(inputs)
        chosen = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        for expert in chosen.unique().tolist():
            if expert < 0:  # the expert is on another rank
                continue
            tokens, choice = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (inputs[tokens] @ self.w13[expert].T).to(x.dtype).float().chunk(2, dim=-1)
            hidden = (_ACTIVATIONS[layer.activation](gate) * up).to(x.dtype)
            expert_output = self.through_codes(hidden) @ self.w2[expert].T
            output.index_add_(0, tokens, expert_output * topk_weights[tokens, choice].float().unsqueeze(-1))
        return output.to(x.dtype)


def require_computable(layer: RoutedExperts, codes: str, refused: dict[str, bool] | None = None) -> None:
    """Raise ValueError for unsupported experts.

    Args:
        layer: the layer with the experts.
        codes: FP8 or INT8, for the message.
        refused: further unsupported properties, each with True if the layer has it.
    """
    refused = {
        **(refused or {}),
        f"activation {layer.activation.value}": layer.activation not in _ACTIVATIONS,
        "biases": layer.moe_config.has_bias,
        "a clamped SwiGLU": layer.swiglu_limit is not None,
        "router weights on the input": layer.apply_router_weight_on_input,
    }
    found = [what for what, present in refused.items() if present]
    if found:
        raise ValueError(
            f"{layer.layer_name}: experts with {', '.join(found)} are not computed in {codes} on the CPU: serve the "
            "model on a GPU, or leave its experts in BF16 through quant.skip"
        )
