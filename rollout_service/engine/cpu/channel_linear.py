"""Channelwise FP8 and INT8 linear layers on the CPU (W8A8), with the numerics of the GPU kernels.

vLLM's own kernels are unsuitable. oneDNN's INT8 kernel gives wrong values after a reload, because its handler keeps
addresses of freed tensors. The FP8 kernels need AMX or do not round inputs. Here the input is rounded to codes with one
scale per token, as in CUTLASS, and multiplied in fp32. Only the speed differs. The decoded weights take four bytes per
parameter in addition to the codes: for small models only.
"""

from collections.abc import Callable

import torch

from rollout_service.compat.vllm_internals import (
    ChannelQuantScaleParameter,
    LinearBase,
    LinearMethodBase,
    ModelWeightParameter,
    register_weight_loader_v2_supported_method,
)
from rollout_service.protocol.tensors import WeightFormatName
from rollout_service.quant.blockwise import E4M3_MAX
from rollout_service.quant.channelwise import INT8_MAX
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL, WeightFormat

_SMALLEST_FP8_SCALE = 1 / (E4M3_MAX * 512)


def through_int8(x: torch.Tensor) -> torch.Tensor:
    """Return an input [M, K] rounded through INT8 as by vLLM's dynamic symmetric ``scaled_int8_quant``: codes times
    scale, fp32.

    Per token ``s = max|x| / 127``, and the code is ``x · (127 / max|x|)``, rounded to nearest even.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    # torch divides a number by a tensor as a product with the reciprocal, which differs in a quarter of all cases
    inverse = torch.where(largest == 0, 0, torch.full_like(largest, INT8_MAX) / largest)
    return (x * inverse).round_().clamp_(-INT8_MAX - 1, INT8_MAX) * (largest / INT8_MAX)


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return an input [M, K] rounded through FP8 as by vLLM's dynamic per-token ``scaled_fp8_quant``: codes times
    scale, fp32.

    Per token ``s = max(max|x| / 448, 1 / (448 · 512))``, and the code is ``x / s``, rounded to nearest even.
    """
    x = x.float()
    scales = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=_SMALLEST_FP8_SCALE)
    return (x / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scales


THROUGH_CODES: dict[WeightFormatName, Callable[[torch.Tensor], torch.Tensor]] = {
    INT8_CHANNEL.name: through_int8,
    FP8_CHANNEL.name: through_fp8,
}
"""The rounding of an input [M, K] to fp32 for each weight format."""


# vLLM chooses a layer's weight loader by the class name of its method
@register_weight_loader_v2_supported_method
class CpuChannelLinearMethod(LinearMethodBase):
    """Computes ``y = x_rounded @ (codes · scales)ᵀ + bias`` in fp32, rounded once. There is one instance per layer."""

    def __init__(self, form: WeightFormat) -> None:
        self.form, self._through_codes = form, THROUGH_CODES[form.name]

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
        """Register ``weight``, the codes [N, K], and ``weight_scale`` fp32 [N, 1] of this rank."""
        rows, loader = sum(output_partition_sizes), extra_weight_attrs.get("weight_loader")
        codes = torch.empty(rows, input_size_per_partition, dtype=self.form.dtype)
        layer.logical_widths = output_partition_sizes
        layer.register_parameter(
            "weight", ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader)
        )
        scales = ChannelQuantScaleParameter(
            data=torch.empty(rows, 1, dtype=torch.float32), output_dim=0, weight_loader=loader
        )
        layer.register_parameter("weight_scale", scales)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Decode the layer's weight to fp32 [N, K]. Runs at every load; codes and scales stay unchanged."""
        self.weight = self.form.dequantize(layer.weight.data, layer.weight_scale.data)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., N] in the dtype of ``x`` [..., K]."""
        made = self._through_codes(x) @ self.weight.T
        return (made if bias is None else made + bias).to(x.dtype)
