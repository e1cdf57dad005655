"""Decode attention of one token per sequence over a paged FP8 KV cache, with few padding rows and FP16 products.

FlashAttention 3 multiplies tiles of 64 rows. A sequence's query fills only 4 or 8 of them, the query heads of one KV
head. Here a tile has 16 rows (``mma.m16n8k16``). One program of at least one warp processes one KV head of one
sequence, or a split of its pages. A single warp needs no synchronization, and several programs per SM hide each other's
latency.

Codes are read as pairs of 16 bits. Both operands are then tiles of 16-bit numbers, which ``ldmatrix`` can transpose as
values require; it cannot transpose bytes. A register holds the pairs of two neighbours along the summed dimension. Two
conversions turn it into the two registers that the tensor cores need: the pairs' first codes, and their second codes.
The sum over a key's elements adds first and second codes separately. First and second elements of the result stay
separate until the end.

The running softmax may begin with the result of another kernel over earlier tokens (``Before``), so that no merge is
needed afterwards. That result becomes the weighted sum, 1 the sum of weights, and its LSE the largest logit.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

ROWS = 16
"""Rows of a tensor-core tile."""
SIZE = 128
"""Supported head size."""
_PROGRAMS = 1024
"""Number of programs that fill an H200. 32 sequences with 8 KV heads are fastest with 4 splits, 256 with 4 KV heads
with one."""
_MAX_SPLITS = 32
"""Maximum number of splits whose results one warp merges."""

Way = Literal["cvt", "bits", "plain"]
"""Conversion of codes to FP16. ``cvt`` uses the GPU's instruction for pairs, ``bits`` uses shifts and yields 2⁻⁸ of the
value. ``plain`` is ``bits`` in Triton code, which also runs in Triton's interpreter."""

_CVT = tl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 lo, hi;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {lo, hi}, x;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)
_BITS = tl.constexpr(
    """{
    .reg .b32 a, b;
    shl.b32 a, $2, 7;
    and.b32 a, a, 0x3f803f80;
    shl.b32 b, $2, 8;
    and.b32 b, b, 0x80008000;
    or.b32 $0, a, b;
    shr.b32 a, $2, 1;
    and.b32 a, a, 0x3f803f80;
    and.b32 b, $2, 0x80008000;
    or.b32 $1, a, b;
    }"""
)


@triton.jit
def _halves(pairs, WAY: tl.constexpr):
    """Return the first and the second codes of int16 pairs as FP16. Without ``cvt`` they are 2⁻⁸ of their values."""
    if WAY == "plain":
        first = ((pairs & 0x7F) << 7) | ((pairs & 0x80) << 8)
        second = ((pairs & 0x7F00) >> 1) | (pairs & -0x8000)
        first, second = first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            _CVT if WAY == "cvt" else _BITS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return first, second


@triton.jit
def _blocks(table, at, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return block ids of the tokens from ``at`` on: a scalar if one page holds them all, else [BLOCK]."""
    if PAGE % BLOCK == 0:
        blocks = tl.load(table + tl.minimum(at, end - 1) // PAGE)
    else:
        blocks = tl.load(table + tl.minimum(at + tl.arange(0, BLOCK), end - 1) // PAGE)
    return blocks


@triton.jit
def _attend(
    at, end, blocks, keys, values, page_stride, token_stride, q_first, q_second, scale, most, total, first, second,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, WAY: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Accumulate the tokens from ``at`` on. ``LAST``: there may be fewer than ``BLOCK`` tokens."""
    pair, token = tl.arange(0, PAIRS), at + tl.arange(0, BLOCK)
    where = blocks.to(tl.int64) * page_stride + token % PAGE * token_stride
    there = token < end
    value_at = values + where[:, None] + pair[None, :]
    key_at = keys + where[None, :] + pair[:, None]
    if LAST:
        codes_k = tl.load(key_at, mask=there[None, :], other=0)
        codes_v = tl.load(value_at, mask=there[:, None], other=0)  # masked to 0: a weight of 0 times garbage must be 0
    else:
        codes_k = tl.load(key_at)
        codes_v = tl.load(value_at)
    k_first, k_second = _halves(codes_k, WAY)
    logits = tl.dot(q_first, k_first)
    logits = tl.dot(q_second, k_second, acc=logits)
    if LAST:
        logits = tl.where(there[None, :], logits, float("-inf"))
    now = tl.maximum(most, tl.max(logits, axis=1) * scale)
    weights = tl.exp2(logits * scale - now[:, None])
    shrink = tl.exp2(most - now)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(tl.float16)
    v_first, v_second = _halves(codes_v, WAY)
    first = tl.dot(weights, v_first, acc=first * shrink[:, None])
    second = tl.dot(weights, v_second, acc=second * shrink[:, None])
    return now, total, first, second


@triton.jit
def _begun(
    before, first_head, unit, out, lse, head_stride, row_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the initial running sums of a tile's rows, from row ``before`` of ``out``; −1 means none."""
    most = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    first = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    second = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    if out is not None:
        row, pair = tl.arange(0, ROWS), tl.arange(0, PAIRS)
        head, at = first_head + row, before.to(tl.int64)
        asked = tl.where(row < GROUP, at, -1) >= 0
        its_lse = tl.load(lse + head * head_stride + at * row_stride, mask=asked, other=float("-inf"))
        found = tl.abs(its_lse) < float("inf")  # false for NaN, too
        most = tl.where(found, its_lse * 1.4426950408889634, most)
        total = tl.where(found, 1.0, total)
        numbers = out + (at * HEADS + head)[:, None] * (2 * PAIRS) + 2 * pair[None, :]
        first = tl.load(numbers, mask=found[:, None], other=0.0).to(tl.float32) / unit
        second = tl.load(numbers + 1, mask=found[:, None], other=0.0).to(tl.float32) / unit
    return most, total, first, second


@triton.jit(do_not_specialize=["n", "before_head_stride", "before_row_stride"])
def decode_part(
    q, keys, values, tables, lengths, q_scale, k_scale, v_scale, out, lse, before_rows, before_out, before_lse,
    softmax_scale, n, q_stride, page_stride, token_stride, head_stride, table_stride,
    before_head_stride, before_row_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WAY: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute one KV head of one sequence, or of a split of its tokens, per program. A sequence's heads are adjacent.

    Args:
        q: pairs of codes, int16 [n, KV_HEADS * GROUP, PAIRS]; ``q_stride`` is the stride between sequences.
        keys, values: pairs of codes, int16 [pages, PAGE, KV_HEADS, PAIRS], with the given strides.
        tables: block ids, int32 [n, table_stride].
        lengths: lengths in tokens, int32 [n]; 0 is padding.
        q_scale, k_scale, v_scale: scales of the codes, one fp32 each.
        out: output, [SPLITS, n, KV_HEADS * GROUP, 2 * PAIRS]. Each split has its own result.
        lse: output, fp32 [SPLITS, KV_HEADS * GROUP, n], natural logarithm; −inf without tokens. None: not wanted.
        before_rows: int32 [n], the row of each sequence's result over earlier tokens; −1 for none. None: no sequence
            has one.
        before_out: the earlier results, [rows, KV_HEADS * GROUP, 2 * PAIRS].
        before_lse: their LSE, with the given strides. A value that is not finite means no tokens; the row is then
            ignored.
    """
    sequence, head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    length = tl.load(lengths + sequence)
    row, pair = tl.arange(0, ROWS), tl.arange(0, PAIRS)
    real = (row < GROUP)[:, None]
    at_query = sequence.to(tl.int64) * q_stride + (head * GROUP + row)[:, None] * PAIRS
    # as pairs, like keys: for 8-bit elements Triton would choose a layout for keys that suits bytes
    q_first, q_second = _halves(tl.load(q + at_query + pair[None, :], mask=real, other=0), WAY)
    scale = softmax_scale * 1.4426950408889634 * tl.load(q_scale) * tl.load(k_scale)
    if WAY != "cvt":
        scale *= 65536.0
    table = tables + sequence.to(tl.int64) * table_stride
    keys += head * head_stride
    values += head * head_stride

    part = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    begin = split * part
    end = tl.minimum(begin + part, length)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
    unit = tl.load(v_scale)  # scale of the accumulated sums
    if WAY != "cvt":
        unit *= 256.0
    before = -1
    if before_rows is not None:
        # the first split continues from the earlier result
        before = tl.where(split == 0, tl.load(before_rows + sequence), -1)
    most, total, first, second = _begun(
        before, head * GROUP, unit, before_out, before_lse, before_head_stride, before_row_stride,
        KV_HEADS * GROUP, GROUP, ROWS, PAIRS,
    )  # fmt: skip
    if begin < end:
        blocks = _blocks(table, begin, end, PAGE, BLOCK)
        for at in tl.range(begin, whole, BLOCK, num_stages=STAGES):
            # loaded one iteration ahead, because Triton otherwise spends half of the stages on block ids
            ahead = _blocks(table, at + BLOCK, end, PAGE, BLOCK)
            most, total, first, second = _attend(
                at, end, blocks, keys, values, page_stride, token_stride, q_first, q_second, scale,
                most, total, first, second, PAGE, BLOCK, PAIRS, WAY, False,
            )  # fmt: skip
            blocks = ahead
        if whole < end:
            most, total, first, second = _attend(
                whole, end, blocks, keys, values, page_stride, token_stride, q_first, q_second, scale,
                most, total, first, second, PAGE, BLOCK, PAIRS, WAY, True,
            )  # fmt: skip

    weight = unit / tl.where(total > 0.0, total, 1.0)
    result = tl.interleave(first * weight[:, None], second * weight[:, None])
    at_row = (split * n + sequence).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row
    target = out + at_row[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real)
    if lse is not None:
        logarithm = tl.where(total > 0.0, most * 0.6931471805599453 + tl.log(total), float("-inf"))
        at_lse = lse + (split * KV_HEADS * GROUP + head * GROUP + row).to(tl.int64) * n + sequence
        tl.store(at_lse, logarithm, mask=row < GROUP)


@triton.jit(do_not_specialize=["n"])
def merge_parts(parts, part_lse, out, lse, n, HEADS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Merge the results of all splits of one head of one sequence per program.

    Args:
        parts: fp32 [SPLITS, n, HEADS, SIZE].
        part_lse: fp32 [SPLITS, HEADS, n].
        out: output, [n, HEADS, SIZE].
        lse: output, fp32 [HEADS, n]. None: not wanted.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    split, at = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    lses = tl.load(part_lse + (split * HEADS + head).to(tl.int64) * n + sequence)
    most = tl.max(lses, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(lses - most)
    total = tl.sum(weights, axis=0)
    row = (split * n + sequence).to(tl.int64) * HEADS + head
    found = tl.load(parts + row[:, None] * SIZE + at[None, :])
    result = tl.sum(found * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (sequence.to(tl.int64) * HEADS + head) * SIZE + at, result.to(out.dtype.element_ty))
    if lse is not None:
        logarithm = tl.where(total > 0.0, most + tl.log(total), float("-inf"))
        tl.store(lse + head.to(tl.int64) * n + sequence, logarithm)


@dataclass(frozen=True)
class Variant:
    """Compile-time options of the kernel. The defaults are the fastest on an H200 for 96 to 4352 tokens."""

    way: Way = "plain" if triton.knobs.runtime.interpret else "cvt"
    block: int = 32
    """Tokens per iteration; a power of two. More leave room for fewer programs per SM, which short contexts need."""
    warps: int = 1
    """Warps per program."""
    stages: int = 3
    """Stages of Triton's pipeline: loads for up to ``stages - 1`` iterations are in flight."""
    splits: int = 1
    """Splits per sequence; a power of two. A second kernel merges more than one."""

    def __str__(self) -> str:
        return f"{self.way}, {self.block} tokens, {self.warps} warps, {self.stages} stages, {self.splits} parts"


def splits_of(sequences: int, kv_heads: int) -> int:
    """Return the number of splits per sequence that fills a GPU with a batch of this size."""
    return min(_MAX_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, sequences * kv_heads)))


@dataclass(frozen=True)
class Before:
    """Attention of the same queries over earlier tokens, with scales applied."""

    rows: torch.Tensor
    """int32 [n]: the row of each sequence in the two tensors below; −1 for no earlier tokens."""
    out: torch.Tensor
    """The results [rows, heads, SIZE], with contiguous rows."""
    lse: torch.Tensor
    """Their LSE, fp32 [heads, rows], natural logarithm, with any strides."""


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    before: Before | None = None,
    variant: Variant = Variant(),
) -> None:
    """Queue the kernels that write ``out`` [n, heads, SIZE] and ``lse``, fp32 [heads, n] with contiguous rows.

    Raises ValueError for another head size, or for more query heads per KV head than a tile has rows.

    Args:
        query: FP8 [n, heads, SIZE], with contiguous heads.
        keys, values: FP8 [pages, tokens per page, KV heads, SIZE], contiguous in the last dimension.
        tables: block ids, int32 [n, pages per sequence].
        lengths: int32 [n]. A sequence without tokens has the result 0 and the LSE −inf.
        scales: scales of q, k and v codes, one fp32 each, read when the kernel runs.
        softmax_scale: scale of the logits.
        out: the output, contiguous.
        lse: the output LSE. None: not wanted.
        before: an earlier result to continue from. ``tables`` and ``lengths`` then cover the tokens after it.
        variant: compile-time options.
    """
    n, heads, size = query.shape
    page, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    if size != SIZE or group > ROWS or heads % kv_heads:
        raise ValueError(f"{heads} query heads of {size} numbers for {kv_heads} KV heads: {SIZE}, and {ROWS} a head")
    for what, given in {"query": query, "out": out}.items():
        if given.stride()[1:] != (SIZE, 1):
            raise ValueError(f"{what}: heads of {SIZE} numbers lie {given.stride()[1:]} apart, not {(SIZE, 1)}")
    if not out.is_contiguous():
        raise ValueError(f"out: sequences of {heads} heads of {SIZE} numbers lie {out.stride(0)} apart")
    pairs, keys, values = (each.view(torch.int16) for each in (query, keys, values))
    if keys.stride() != values.stride():
        raise ValueError(f"keys and values lie apart by {keys.stride()} and {values.stride()}")
    single = variant.splits == 1
    parts, part_lse = out, lse
    if not single:
        parts = torch.empty(variant.splits, n, heads, SIZE, device=query.device)
        part_lse = torch.empty(variant.splits, heads, n, device=query.device)
    page_stride, token_stride, head_stride, _ = keys.stride()
    earlier = (None, None, None) if before is None else (before.rows, before.out, before.lse)
    earlier_strides = (0, 0) if before is None else before.lse.stride()
    decode_part[(n * kv_heads, variant.splits)](
        pairs, keys, values, tables, lengths, *scales, parts, part_lse, *earlier,
        softmax_scale, n, pairs.stride(0), page_stride, token_stride, head_stride, tables.stride(0), *earlier_strides,
        KV_HEADS=kv_heads, GROUP=group, PAGE=page, BLOCK=variant.block, SPLITS=variant.splits, STAGES=variant.stages,
        WAY=variant.way, ROWS=ROWS, PAIRS=SIZE // 2, num_warps=variant.warps,
    )  # fmt: skip
    if not single:
        merge_parts[(n, heads)](
            parts, part_lse, out, lse, n, HEADS=heads, SPLITS=variant.splits, SIZE=SIZE, num_warps=1
        )
