"""Attention of one token of each sequence to a paged FP8 KV cache, with few padding rows and products in FP16.

FlashAttention 3 multiplies tiles of 64 rows, of which a sequence's query fills 4 or 8, the query heads of one KV head.
Here a tile has 16 rows (``mma.m16n8k16``). One program, of as few warps as one, goes through the pages of one KV head
of one sequence, or of a part of it: a warp on its own exchanges nothing with others, and several programs an SM hide
each other's waiting.

Codes are read as pairs, 16 bits each. So both operands are tiles of 16-bit numbers, which ``ldmatrix`` also transposes,
as values need and as it cannot do with bytes. A register then has the pairs of two neighbours along the summed
dimension, and two conversions make of it the two registers that the tensor cores want: one of the pairs' first codes,
one of their second ones. Keys are summed over the head's numbers, first and second ones apart; of values, first and
second numbers of the result are apart until the end.

The running sums of the softmax may begin with what another kernel made of tokens before these (``Before``), so that
nothing has to be merged afterwards: its result as the weighted sum, 1 as the sum of weights, its LSE as the largest
logit.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

ROWS = 16
"""Of a tile of the tensor cores."""
SIZE = 128
"""Numbers of a head."""
_PROGRAMS = 1024
"""That occupy an H200: 32 sequences of 8 KV heads are fastest in 4 parts, 256 of 4 KV heads in one
(``benchmarks/results/h200/kernels_fp8_decode.json``)."""
_MOST_SPLITS = 32
"""Whose results one warp merges."""

Way = Literal["cvt", "bits", "plain"]
"""How codes become FP16: by the GPU's instruction for two of them, by shifts (the value is then 2⁻⁸ of the code's), or
by the same shifts in Triton's own words, which its interpreter understands, too."""

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
    """Of pairs of codes, int16: the first ones and the second ones, FP16; 2⁻⁸ of their values unless ``cvt``."""
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
    """Block ids of a sequence's tokens from ``at`` on: one number if a page has them all, else [BLOCK]."""
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
    """Take in the tokens from ``at`` on; ``LAST``: there may be fewer than ``BLOCK``."""
    pair, token = tl.arange(0, PAIRS), at + tl.arange(0, BLOCK)
    where = blocks.to(tl.int64) * page_stride + token % PAGE * token_stride
    there = token < end
    value_at = values + where[:, None] + pair[None, :]
    key_at = keys + where[None, :] + pair[:, None]
    if LAST:
        codes_k = tl.load(key_at, mask=there[None, :], other=0)
        codes_v = tl.load(value_at, mask=there[:, None], other=0)  # whatever lies there, 0 times it is to be 0
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
    """The running sums of a tile's rows before its first token: those of row ``before`` of ``out``; −1: nothing."""
    most = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    first = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    second = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    if out is not None:
        row, pair = tl.arange(0, ROWS), tl.arange(0, PAIRS)
        head, at = first_head + row, before.to(tl.int64)
        asked = tl.where(row < GROUP, at, -1) >= 0
        its_lse = tl.load(lse + head * head_stride + at * row_stride, mask=asked, other=float("-inf"))
        found = tl.abs(its_lse) < float("inf")  # NaN is not either
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
    """One KV head of one sequence, or a part of its tokens: a program each, heads of a sequence side by side.

    Args:
        q: pairs of codes, int16 [n, KV_HEADS * GROUP, PAIRS]; ``q_stride``: between sequences.
        keys, values: likewise [pages, PAGE, KV_HEADS, PAIRS] by the strides given.
        tables: block ids int32 [n, table_stride]. lengths: tokens int32 [n]; 0: padding.
        q_scale, k_scale, v_scale: what codes are multiplied by, one fp32 each.
        out: to write, [SPLITS, n, KV_HEADS * GROUP, 2 * PAIRS]; of a part, its own result.
        lse: to write, fp32 [SPLITS, KV_HEADS * GROUP, n], natural logarithm; −inf where there is no token. None: nobody
            asks.
        before_rows: int32 [n], the row in which each sequence's result over earlier tokens stands; −1: it has none.
            None: no sequence has one.
        before_out: that result, [rows, KV_HEADS * GROUP, 2 * PAIRS]. before_lse: its LSE, by the strides given; one
            that is not finite means no token, whatever stands in the row.
    """
    sequence, head, split = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    length = tl.load(lengths + sequence)
    row, pair = tl.arange(0, ROWS), tl.arange(0, PAIRS)
    real = (row < GROUP)[:, None]
    at_query = sequence.to(tl.int64) * q_stride + (head * GROUP + row)[:, None] * PAIRS
    # pairs, as keys are: where Triton sees numbers of 8 bits it reads keys in the way that suits those
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
    unit = tl.load(v_scale)  # of what is summed up
    if WAY != "cvt":
        unit *= 256.0
    before = -1
    if before_rows is not None:
        before = tl.where(split == 0, tl.load(before_rows + sequence), -1)  # the first part goes on from it
    most, total, first, second = _begun(
        before, head * GROUP, unit, before_out, before_lse, before_head_stride, before_row_stride,
        KV_HEADS * GROUP, GROUP, ROWS, PAIRS,
    )  # fmt: skip
    if begin < end:
        blocks = _blocks(table, begin, end, PAGE, BLOCK)
        for at in tl.range(begin, whole, BLOCK, num_stages=STAGES):
            # read one turn ahead: else Triton spends half of the stages on the way from block ids to keys
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
    """The results of all parts of a head of a sequence made one: a program each.

    Args:
        parts: fp32 [SPLITS, n, HEADS, SIZE]. part_lse: fp32 [SPLITS, HEADS, n].
        out: to write, [n, HEADS, SIZE]. lse: to write, fp32 [HEADS, n]; None: nobody asks.
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
    """How the kernel is made. The defaults are the fastest of ``python -m benchmarks.kernels.fp8_decode``."""

    way: Way = "plain" if triton.knobs.runtime.interpret else "cvt"
    block: int = 64
    """Tokens of a turn; a power of two."""
    warps: int = 1
    """Of a program."""
    stages: int = 4
    """Of Triton's pipeline: tokens of so many turns less one are on their way or here."""
    splits: int = 1
    """Parts of a sequence; a power of two. More than one are merged by a second kernel."""

    def __str__(self) -> str:
        return f"{self.way}, {self.block} tokens, {self.warps} warps, {self.stages} stages, {self.splits} parts"


def splits_of(sequences: int, kv_heads: int) -> int:
    """Parts of a sequence that occupy a GPU with a batch of so many."""
    return min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, sequences * kv_heads)))


@dataclass(frozen=True)
class Before:
    """Attention of the same queries to earlier tokens, with scales applied."""

    rows: torch.Tensor
    """int32 [n]: each sequence's row of the two below; −1: it has no such tokens."""
    out: torch.Tensor
    """[rows, heads, SIZE], each row side by side."""
    lse: torch.Tensor
    """fp32 [heads, rows], natural logarithm, with any strides."""


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
    """Queue the kernels that write ``out`` [n, heads, SIZE] and ``lse``, fp32 [heads, n] with its rows side by side.

    Args:
        query: FP8 [n, heads, SIZE], a sequence's heads side by side.
        keys, values: FP8 [pages, tokens of a page, KV heads, SIZE], with any strides but the last.
        tables: block ids int32 [n, pages of a sequence].
        lengths: int32 [n]; the result of one without tokens is 0, its LSE −inf.
        scales: what codes of q, k and v are multiplied by, one fp32 each, read when the kernel runs.
        before: what to go on from; ``tables`` and ``lengths`` are of the tokens after it.

    Raises ValueError for other sizes of heads, or more query heads of a KV head than a tile has rows.
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
