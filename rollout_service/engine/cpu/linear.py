"""Linear layers with FP8 or INT8 weights on the CPU (W8A8), with the numerics of the GPU kernels.

vLLM's own kernels are unsuitable. Those for FP8 need AMX, or keep activations in BF16 (W8A16), so their logprobs differ
from a GPU's. oneDNN's INT8 kernel gives wrong values after a reload, because its handler keeps addresses of freed
tensors. Here the input is rounded to codes as in CUTLASS and DeepGEMM, and multiplied in fp32. Only the speed differs.
The decoded weights take four bytes per parameter in addition to the codes: for small models only.
"""

from collections.abc import Callable

import torch

from rollout_service.compat.vllm_internals import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    Fp8Config,
    Fp8LinearMethod,
    GroupShape,
    LinearBase,
    LinearMethodBase,
    ModelWeightParameter,
    QuantFP8,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    register_weight_loader_v2_supported_method,
    validate_fp8_block_shape,
)
from rollout_service.protocol.tensors import WeightFormatName
from rollout_service.quant.blockwise import BLOCK, E4M3_MAX
from rollout_service.quant.formats import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, INT8_MAX, WeightFormat

ThroughCodes = Callable[[torch.Tensor], torch.Tensor]
"""Rounds an input [M, K] as a kernel does: codes times scales, fp32."""
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


def through_fp8_groups() -> ThroughCodes:
    """Return the rounding through FP8 in groups of 1×128, by vLLM's own quantizer."""
    quantize = QuantFP8(static=False, group_shape=GroupShape(1, BLOCK), use_ue8m0=False)

    def through_codes(x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize(x)
        return (codes.float().view(*scales.shape, BLOCK) * scales.unsqueeze(-1)).view(codes.shape)

    return through_codes


THROUGH_CODES: dict[WeightFormatName, ThroughCodes] = {INT8_CHANNEL.name: through_int8, FP8_CHANNEL.name: through_fp8}


class CpuLinearMethod(LinearMethodBase):
    """Computes ``y = x_rounded @ (codes · scales)ᵀ + bias`` in fp32, rounded once. There is one instance per layer.

    The weight is decoded at every load of the layer, because decoding FP8 takes 30 times longer than the product. The
    loaded codes and scales stay unchanged.
    """

    form: WeightFormat
    weight: torch.Tensor
    """fp32 [N, K]."""
    through_codes: ThroughCodes

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Decode the layer's weight to fp32 [N, K]."""
        scales = getattr(layer, f"weight{self.form.scale_suffix}")
        self.weight = self.form.dequantize(layer.weight.data, scales.data)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [..., N] in the dtype of ``x`` [..., K]."""
        made = self.through_codes(x.reshape(-1, x.shape[-1])) @ self.weight.T
        return (made if bias is None else made + bias).to(x.dtype).view(*x.shape[:-1], self.weight.shape[0])


# vLLM chooses a layer's weight loader by the class name of its method
@register_weight_loader_v2_supported_method
class CpuBlockLinearMethod(CpuLinearMethod, Fp8LinearMethod):
    """Weights in blocks of 128×128, inputs in groups of 1×128.

    vLLM's class looks for a kernel in ``create_weights``, and finds none on a CPU without AMX.
    """

    def __init__(self, quant_config: Fp8Config) -> None:
        """Create the method. Raises ValueError for blocks of another size."""
        Fp8LinearMethod.__init__(self, quant_config)
        if self.weight_block_size != [BLOCK, BLOCK]:
            raise ValueError(f"weight blocks must be {BLOCK}×{BLOCK}, not {self.weight_block_size}")
        self.form, self.through_codes = FP8_BLOCK, through_fp8_groups()

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


@register_weight_loader_v2_supported_method
class CpuChannelLinearMethod(CpuLinearMethod):
    """FP8 or INT8 weights with one scale per output channel, inputs with one per token."""

    def __init__(self, form: WeightFormat) -> None:
        self.form, self.through_codes = form, THROUGH_CODES[form.name]

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
        weight = ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader)
        scales = ChannelQuantScaleParameter(
            data=torch.empty(rows, 1, dtype=torch.float32), output_dim=0, weight_loader=loader
        )
        layer.logical_widths = output_partition_sizes
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scales)
