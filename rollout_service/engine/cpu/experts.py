"""Mixtures of experts on the CPU, with the roundings of the GPU kernels.

vLLM's own CPU kernels need AMX and keep activations in BF16 (W8A16). Here, as in vLLM's Triton kernel, the input of
each of an expert's two products is rounded to its codes. Products are summed in fp32, and the result between them is
BF16. The decoded weights take four bytes per parameter in addition to the codes: for small models only.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from rollout_service.compat.vllm_internals import (
    Fp8Config,
    Fp8MoEMethod,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    FusedMoeWeightScaleSupported,
    MoEActivation,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    forget_kernel,
    set_weight_attrs,
)
from rollout_service.engine.cpu.linear import THROUGH_CODES, ThroughCodes, through_fp8_groups
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import FP8_BLOCK, WeightFormat

# without BF16 instructions, vLLM's own CPU kernels truncate BF16 results instead of rounding them
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: silu,
    MoEActivation.GELU: gelu,
    MoEActivation.GELU_TANH: partial(gelu, approximate="tanh"),
}


class CpuExperts(FusedMoEMethodBase):
    """Computes with decoded weights. They are decoded at every load of the layer, so that they always have the version
    of the codes, which stay unchanged."""

    form: WeightFormat
    w13: torch.Tensor
    """fp32 [E, 2·I, H]."""
    w2: torch.Tensor
    """fp32 [E, H, I]."""
    through_codes: ThroughCodes

    def __init__(self, layer: RoutedExperts, form: WeightFormat, refused: dict[str, bool] | None = None) -> None:
        """Create the method. Raises ValueError for unsupported experts.

        ``refused``: names of further properties, each with True if the experts have it.
        """
        # not super(): Fp8MoEMethod's would look for a backend, and find none on a CPU without AMX
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.form = form
        unsupported = {
            **(refused or {}),
            f"activation {layer.activation.value}": layer.activation not in _ACTIVATIONS,
            "biases": layer.moe_config.has_bias,
            "a clamped SwiGLU": layer.swiglu_limit is not None,
            "router weights on the input": layer.apply_router_weight_on_input,
        }
        if found := [what for what, present in unsupported.items() if present]:
            codes = "FP8" if form.dtype.is_floating_point else "INT8"
            raise ValueError(
                f"{layer.layer_name}: experts with {', '.join(found)} are not computed in {codes} on the CPU: serve "
                "the model on a GPU, or leave its experts in BF16 through quant.skip"
            )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Return an empty configuration: vLLM's own kernels are not used."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Decode w13 to fp32 [E, 2·I, H] and w2 to fp32 [E, H, I]."""
        suffix = self.form.scale_suffix
        self.w13 = self.form.dequantize(layer.w13_weight.data, getattr(layer, f"w13_weight{suffix}").data)
        self.w2 = self.form.dequantize(layer.w2_weight.data, getattr(layer, f"w2_weight{suffix}").data)

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


class CpuBlockMoEMethod(CpuExperts, Fp8MoEMethod):
    """Weights in blocks of 128×128, inputs in groups of 1×128. vLLM's class creates and loads the parameters."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        block = quant_config.weight_block_size
        CpuExperts.__init__(self, layer, FP8_BLOCK, {f"weight blocks {block}": block != [BLOCK, BLOCK]})
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.weight_scale_name = True, "weight_scale_inv"
        self.weight_scale_refine = None
        self.through_codes = through_fp8_groups()


class CpuChannelMoEMethod(CpuExperts):
    """FP8 or INT8 weights with one scale per output channel, inputs with one per token."""

    def __init__(self, form: WeightFormat, layer: RoutedExperts) -> None:
        CpuExperts.__init__(self, layer, form)
        self.through_codes = THROUGH_CODES[form.name]

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Register the codes w13 [E, 2·I, H] and w2 [E, H, I], and their scales fp32 [E, 2·I, 1] and [E, H, 1]."""
        shapes = {
            "w13": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        by_channel = {"quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        for name, (experts, rows, columns) in shapes.items():
            codes = torch.nn.Parameter(torch.empty(experts, rows, columns, dtype=self.form.dtype), requires_grad=False)
            scales = torch.nn.Parameter(torch.empty(experts, rows, 1, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(codes, extra_weight_attrs)
            set_weight_attrs(scales, extra_weight_attrs | by_channel)
            layer.register_parameter(f"{name}_weight", codes)
            layer.register_parameter(f"{name}_weight_scale", scales)


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
