"""Launches the Triton kernel over many matrices: one launch for all matrices of equal shape, strides and dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_service.quant.blockwise import BLOCK, scale_shape
from rollout_service.quant.triton_kernel import quantize_blocks

LAUNCH_OPTIONS = {"num_warps": 8, "maxnreg": 80}
"""Three blocks then fit a multiprocessor's registers (H200), so that reading one overlaps with writing another; left
alone, the compiler takes 128 registers a thread and two fit: 5 to 8% slower."""
MAX_MATRICES = 65535
"""Of one launch: the extent of CUDA's grid in its second dimension."""

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_ALIGNED_BYTES = 16
_MAX_WHOLE_STRIDE = 1 << 24


@dataclass(frozen=True)
class Layout:
    """What the matrices of one launch have in common."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: torch.dtype
    whole: bool
    """Full blocks of contiguous, aligned rows: the kernel then needs no masks."""


@dataclass(frozen=True)
class _Launch:
    layout: Layout
    matrices: int
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """The kernel's first four: the table of several matrices, or weight, codes and scales of the only one. What a
    launch does not read is filled up with what it has, since the kernel wants some tensor there."""


class GroupedQuantization:
    """Quantizes fixed storage, as often as it is run: prepare once, ``run`` at each version.

    ``weights``: [N, K] or [E, N, K], BF16, FP16 or FP32, of any strides. ``codes``, e4m3, and ``scales``, fp32, of the
    same leading dimensions, contiguous, are written; nothing else is allocated but a table of addresses, 24 bytes a
    matrix. NaN and infinity become scales that are not finite: look at those before the codes are used.

    Raises ValueError for tensors that do not belong together, or are not on one device.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        *,
        power_of_two: bool = False,
    ) -> None:
        self._power_of_two = power_of_two
        self._kept = (tuple(weights), tuple(codes), tuple(scales))  # the table holds bare addresses
        groups: dict[Layout, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        for weight, code, scale in zip(weights, codes, scales, strict=True):
            _require_fit(weight, code, scale)
            for matrix in zip(*map(_matrices, (weight, code, scale)), strict=True):
                if matrix[0].numel():
                    groups.setdefault(_layout(matrix[0], matrix[1]), []).append(matrix)
        self._launches = [
            _prepare(layout, group[start : start + MAX_MATRICES])
            for layout, group in groups.items()
            for start in range(0, len(group), MAX_MATRICES)
        ]

    @property
    def launches(self) -> int:
        """Kernel launches of one ``run``."""
        return len(self._launches)

    def run(self) -> None:
        """Queue the kernels on the current stream."""
        for launch in self._launches:
            _run(launch, self._power_of_two)


def _require_fit(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    if weight.dtype not in _DTYPES or weight.dim() not in (2, 3):
        raise ValueError(
            f"a {weight.dtype} tensor of {weight.dim()} dimensions: give BF16, FP16 or FP32 of 2 (or 3, stacked)"
        )
    expected = scale_shape(tuple(weight.shape))
    if codes.shape != weight.shape or tuple(scales.shape) != expected:
        raise ValueError(
            f"weight {list(weight.shape)} needs codes of its shape and scales {list(expected)}, but was given "
            f"{list(codes.shape)} and {list(scales.shape)}"
        )
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise ValueError(f"codes must be float8_e4m3fn and scales float32, not {codes.dtype} and {scales.dtype}")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")
    if not weight.device == codes.device == scales.device:
        raise ValueError(f"weight, codes and scales lie on {weight.device}, {codes.device} and {scales.device}")


def _matrices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor,) if tensor.dim() == 2 else tensor.unbind()


def _layout(weight: torch.Tensor, codes: torch.Tensor) -> Layout:
    rows, columns = weight.shape
    row_stride, column_stride = weight.stride()
    aligned = (weight.data_ptr(), row_stride * weight.element_size(), codes.data_ptr())
    whole = (
        rows % BLOCK == columns % BLOCK == 0
        and column_stride == 1
        and 0 <= row_stride < _MAX_WHOLE_STRIDE
        and all(address % _ALIGNED_BYTES == 0 for address in aligned)
    )
    return Layout(rows, columns, row_stride, column_stride, weight.dtype, whole)


def _prepare(layout: Layout, group: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> _Launch:
    if len(group) == 1:
        weight, codes, scales = group[0]
        return _Launch(layout, 1, (scales, weight, codes, scales))
    addresses = torch.tensor([[tensor.data_ptr() for tensor in matrix] for matrix in group], dtype=torch.int64)
    table = addresses.to(group[0][0].device)
    return _Launch(layout, len(group), (table, table, table, table))


def _run(launch: _Launch, power_of_two: bool) -> None:
    layout = launch.layout
    grid = (triton.cdiv(layout.rows, BLOCK) * triton.cdiv(layout.columns, BLOCK), launch.matrices)
    quantize_blocks[grid](
        *launch.arguments,
        layout.rows,
        layout.columns,
        layout.row_stride,
        layout.column_stride,
        DTYPE=_DTYPES[layout.dtype],
        GROUPED=launch.matrices > 1,
        WHOLE=layout.whole,
        POWER_OF_TWO=power_of_two,
        INTERPRETED=triton.knobs.runtime.interpret,
        **LAUNCH_OPTIONS,
    )
