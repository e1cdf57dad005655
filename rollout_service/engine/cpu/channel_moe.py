"""Channelwise INT8 and FP8 mixture of experts on the CPU (W8A8), with the sum of ``experts.py``."""

import torch

from rollout_service.compat.vllm_internals import (
    FusedMoeWeightScaleSupported,
    RoutedExperts,
    set_weight_attrs,
)
from rollout_service.engine.cpu.channel_linear import THROUGH_CODES
from rollout_service.engine.cpu.experts import CpuExperts, require_computable
from rollout_service.quant.formats import WeightFormat


class CpuChannelMoEMethod(CpuExperts):
    """Experts with one scale per output channel. vLLM's CPU kernels need AMX, and its INT8 kernels do not round
    inputs."""

    def __init__(self, form: WeightFormat, layer: RoutedExperts) -> None:
        """Create the method. Raises ValueError for unsupported experts."""
        super().__init__(layer.moe_config)
        require_computable(layer, "FP8" if form.dtype.is_floating_point else "INT8")
        self.form, self.through_codes = form, THROUGH_CODES[form.name]

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

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Decode w13 to fp32 [E, 2·I, H] and w2 to fp32 [E, H, I]. Runs at every load of the layer."""
        self.w13 = self.form.dequantize(layer.w13_weight.data, layer.w13_weight_scale.data)
        self.w2 = self.form.dequantize(layer.w2_weight.data, layer.w2_weight_scale.data)
