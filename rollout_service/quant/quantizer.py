"""Quantize many named weights at once on any device, with the fastest implementation; all give the same bytes."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Literal

import torch

from rollout_service.gpu.streams import own_stream
from rollout_service.quant.blockwise import require_finite
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.formats import FP8_BLOCK, WeightFormat
from rollout_service.runtime.views import view_at

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
Named = tuple[str, torch.Tensor]
Quantized = tuple[torch.Tensor, torch.Tensor]
_CODES_ALIGNMENT = 16
"""The kernel stores 16 codes at a time."""


class Quantizer:
    """Blockwise FP8, or channelwise FP8 or INT8, bit for bit ``quantize_blockwise`` or ``quantize_channelwise``.

    Weights on a GPU are quantized there. Weights on the CPU are quantized on ``device`` and returned to the CPU;
    ``auto``: on a GPU if torch sees one. Raises ValueError for ``cuda`` without a GPU. Thread-safe.
    """

    def __init__(self, *, power_of_two: bool = False, device: Device = "auto", form: WeightFormat = FP8_BLOCK) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch sees no GPU here: give this process one, or use auto")
        self._power_of_two, self._form = power_of_two, form
        self.uses_gpu = device != "cpu" and torch.cuda.is_available()
        """True if weights on the CPU are quantized on a GPU."""

    def quantize(
        self,
        weights: Sequence[Named],
        *,
        to_cpu: bool = False,
        left_on_gpu: bool = False,
        checks: DeferredChecks | None = None,
    ) -> list[Quantized]:
        """Return codes and scales fp32 of each weight [N, K] or [E, N, K]; all on one device, of any dtype and strides.

        Results are on the weights' device, or on the CPU with ``to_cpu``; with ``left_on_gpu``, on the device that
        computed them. On a GPU the codes of a call share one allocation, and so do the scales: one copy brings all of
        them to the CPU. Returns once they are written. Raises QuantizationError with the name of the first weight that
        holds NaN or infinity.

        ``checks``: for weights that stay on a GPU, the call returns once all work is queued on the thread's own stream
        (``own_stream``). The check for finite numbers is queued there, too, and ``DeferredChecks`` raises the error.
        """
        if not weights:
            return []
        device = weights[0][1].device
        if device.type != "cuda" and not self.uses_gpu:
            return [self._on_cpu(name, weight) for name, weight in weights]
        gpu = device if device.type == "cuda" else torch.device("cuda", 0)
        to_cpu = to_cpu or (device.type != "cuda" and not left_on_gpu)
        # host memory may be overwritten after this returns
        later = checks if device.type == "cuda" and not to_cpu else None
        return self._on_gpu(weights, gpu, to_cpu=to_cpu, later=later)

    def _on_cpu(self, name: str, weight: torch.Tensor) -> Quantized:
        codes, scales = _cpu_quantizer(self._form)(weight, self._power_of_two)
        if not bool(torch.isfinite(scales).all()):
            require_finite(weight, name)
        return codes, scales

    def _on_gpu(
        self, weights: Sequence[Named], gpu: torch.device, *, to_cpu: bool, later: DeferredChecks | None
    ) -> list[Quantized]:
        from rollout_service.quant.cuda import GroupedQuantization

        callers = torch.cuda.current_stream(gpu)
        with own_stream(gpu) as stream:
            sources = [
                weight if weight.device == gpu else _pin(weight.detach()).to(gpu, non_blocking=True)
                for _, weight in weights
            ]
            shapes = [tuple(weight.shape) for weight in sources]
            scale_shapes = [self._form.scale_shape(shape) for shape in shapes]
            codes = _allocated(shapes, self._form.dtype, gpu, _CODES_ALIGNMENT)
            scales = _allocated(scale_shapes, torch.float32, gpu)
            made = _views(codes, shapes, _CODES_ALIGNMENT), _views(scales, scale_shapes)
            GroupedQuantization(sources, *made, power_of_two=self._power_of_two, form=self._form).run()
            finite = _are_finite(scales)
            if later is not None:
                later.add(finite, lambda: _require_all_finite(weights))
                return list(zip(*made, strict=True))
            if to_cpu:
                codes, scales = _to_cpu(codes), _to_cpu(scales)
                made = _views(codes, shapes, _CODES_ALIGNMENT), _views(scales, scale_shapes)
            else:
                for storage in (codes, scales):
                    storage.record_stream(callers)  # allocated on our stream, and read on the caller's
            sound = bool(finite)
            stream.synchronize()
        if not sound:
            _require_all_finite(weights)
        return list(zip(*made, strict=True))


def _are_finite(scales: torch.Tensor) -> torch.Tensor:
    """Check that scales, which are not negative, are finite: bool [] on their device."""
    # two kernels, while isfinite alone is four; the maximum is NaN if any scale is
    return scales.amax() < math.inf if scales.numel() else torch.ones((), dtype=torch.bool, device=scales.device)


def _require_all_finite(weights: Sequence[Named]) -> None:
    for name, weight in weights:
        require_finite(weight, name)


def _allocated(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, align: int = 1
) -> torch.Tensor:
    """Allocate tensors of these shapes together. ``align``: alignment of each, in elements."""
    return torch.empty(sum(_padded_size(shape, align) for shape in shapes), dtype=dtype, device=device)


def _views(storage: torch.Tensor, shapes: Sequence[tuple[int, ...]], align: int = 1) -> list[torch.Tensor]:
    starts = accumulate((_padded_size(shape, align) for shape in shapes), initial=0)
    return [view_at(storage, start, shape) for start, shape in zip(starts, shapes, strict=False)]


def _to_cpu(storage: torch.Tensor) -> torch.Tensor:
    """Queue the copy on the current stream."""
    return torch.empty_like(storage, device="cpu", pin_memory=True).copy_(storage, non_blocking=True)


def _pin(weight: torch.Tensor) -> torch.Tensor:
    # torch reuses pinned memory; from other memory the driver copies in small pieces, one thread at a time
    if weight.device.type == "cuda" or weight.is_pinned():
        return weight
    return torch.empty_like(weight, pin_memory=True).copy_(weight)


@lru_cache(1024)
def _padded_size(shape: tuple[int, ...], align: int) -> int:
    return -(-math.prod(shape) // align) * align


@cache
def _cpu_quantizer(form: WeightFormat) -> Callable[[torch.Tensor, bool], Quantized]:
    try:
        from rollout_service.quant.cpu import quantize_blocks_cpu, quantize_channels_cpu
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        logger.warning("numba is not installed: weights on the CPU are quantized by plain torch, 50 times slower")
        blocks, channels = form.quantize, form.quantize
    else:
        blocks, channels = quantize_blocks_cpu, partial(quantize_channels_cpu, dtype=form.dtype)
    if form.in_blocks:
        return lambda weight, power_of_two: blocks(weight, power_of_two=power_of_two)
    return lambda weight, _: channels(weight)
