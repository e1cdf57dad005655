"""Copy queries to the rows of a grouped batch's entries, and merge the two partial results of each sequence.

Softmax attention over two sets of tokens is the weighted mean of the two results. The weights are the sums of
exponentials, whose logarithm (LSE) attention kernels return. FlashAttention merges splits this way (arXiv 2205.14135,
section 3.1), and Hydragen shared prefixes (arXiv 2402.05099, section 3.1).
"""

import torch
import triton
import triton.language as tl

_HEADS = 8
"""Heads per program."""


@triton.jit
def spread_queries(
    query, token_stride, rows, shared_rows, own_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy each sequence's query [HEADS, SIZE] to its rows of ``rows`` [rows, HEADS, SIZE]. A few heads per program."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    inside = (head < HEADS) & (at < SIZE)
    value = tl.load(query + sequence * token_stride + head * SIZE + at, mask=inside)
    shared = tl.load(shared_rows + sequence).to(tl.int64)
    tl.store(rows + shared * HEADS * SIZE + head * SIZE + at, value, mask=tl.where(inside, shared, -1) >= 0)
    if own_rows is not None:
        own = tl.load(own_rows + sequence).to(tl.int64)
        tl.store(rows + own * HEADS * SIZE + head * SIZE + at, value, mask=tl.where(inside, own, -1) >= 0)


# not specialized on strides, which would compile the kernel again for each batch size
@triton.jit(do_not_specialize=["lse_head_stride", "lse_row_stride"])
def merge_rows(
    partial, lse, lse_head_stride, lse_row_stride, shared_rows, own_rows, output, token_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write each sequence's result [HEADS, SIZE] from its rows of ``partial`` [rows, HEADS, SIZE].

    ``lse``: fp32, natural logarithm, one per head of each row. A part that is missing or has no tokens has weight 0,
    whatever its row holds. Without both parts the result is 0.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, PADDED)[None, :]
    shared = tl.load(shared_rows + sequence).to(tl.int64)
    own = tl.load(own_rows + sequence).to(tl.int64)
    inside = head < HEADS
    lses = lse + head * lse_head_stride
    shared_lse = tl.load(lses + shared * lse_row_stride, mask=tl.where(inside, shared, -1) >= 0, other=float("-inf"))
    own_lse = tl.load(lses + own * lse_row_stride, mask=tl.where(inside, own, -1) >= 0, other=float("-inf"))
    # without tokens FlashAttention 2 returns +inf, FlashAttention 3 −inf
    shared_lse = tl.where(tl.abs(shared_lse) < float("inf"), shared_lse, float("-inf"))
    own_lse = tl.where(tl.abs(own_lse) < float("inf"), own_lse, float("-inf"))
    largest = tl.maximum(shared_lse, own_lse)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    shared_sum, own_sum = tl.exp(shared_lse - largest), tl.exp(own_lse - largest)
    total = shared_sum + own_sum
    total = tl.where(total == 0.0, 1.0, total)

    element = head[:, None] * SIZE + at
    # a row of weight 0 is not read, because it may hold NaN
    reads = (at < SIZE) & (shared_sum > 0.0)[:, None]
    shared_part = tl.load(partial + shared * HEADS * SIZE + element, mask=reads, other=0.0).to(tl.float32)
    reads = (at < SIZE) & (own_sum > 0.0)[:, None]
    own_part = tl.load(partial + own * HEADS * SIZE + element, mask=reads, other=0.0).to(tl.float32)
    result = shared_part * (shared_sum / total)[:, None] + own_part * (own_sum / total)[:, None]
    written = inside[:, None] & (at < SIZE)
    tl.store(output + sequence * token_stride + element, result.to(output.dtype.element_ty), mask=written)


def spread(
    query: torch.Tensor, rows: torch.Tensor, shared_rows: torch.Tensor, own_rows: torch.Tensor | None = None
) -> None:
    """Queue the copies of ``query`` [n, heads, size] to ``rows`` [rows, heads, size]. Other rows are unchanged.

    Row numbers are those of ``Grouped``. Without ``own_rows`` only shared rows are written. Raises ValueError if the
    heads of a query are not contiguous.
    """
    heads, size, grid = _geometry(query)
    spread_queries[grid](
        query, query.stride(0), rows, shared_rows, own_rows,
        HEADS=heads, SIZE=size, GROUP=_HEADS, PADDED=triton.next_power_of_2(size),
    )  # fmt: skip


def merge(
    partial: torch.Tensor, lse: torch.Tensor, shared_rows: torch.Tensor, own_rows: torch.Tensor, output: torch.Tensor
) -> None:
    """Queue the kernel that writes ``output`` [n, heads, size].

    Raises ValueError if the heads of a result are not contiguous.

    Args:
        partial: each row's result over its entry's tokens, [rows, heads, size].
        lse: fp32 [heads, rows], with any strides.
        shared_rows, own_rows: see ``Grouped``.
        output: the merged results.
    """
    heads, size, grid = _geometry(output)
    _geometry(partial)
    merge_rows[grid](
        partial, lse, lse.stride(0), lse.stride(1), shared_rows, own_rows, output, output.stride(0),
        HEADS=heads, SIZE=size, GROUP=_HEADS, PADDED=triton.next_power_of_2(size),
    )  # fmt: skip


def _geometry(rows: torch.Tensor) -> tuple[int, int, tuple[int, int]]:
    """Return the number of heads, the head size, and the grid of a kernel with a few heads of one row per program."""
    count, heads, size = rows.shape
    if rows.stride()[1:] != (size, 1):
        raise ValueError(f"heads of {size} numbers lie {rows.stride()[1:]} apart, and {(size, 1)} is expected")
    return heads, size, (count, triton.cdiv(heads, _HEADS))
