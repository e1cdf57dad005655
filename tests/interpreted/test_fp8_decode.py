"""The decode kernel for an FP8 cache, run by Triton's interpreter, beside plain attention."""

import pytest
import torch
import triton
import triton.language as tl

from rollout_service.engine.attention.fp8_decode import SIZE, Before, Variant, _halves, decode, splits_of
from tests.interpreted.plain_decode import plain_decode

PAGE = 32
LENGTHS = (70, 1, 0, 64, 33)
SCALES = tuple(torch.tensor(scale) for scale in (0.5, 2.0, 0.25))


def fp8(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(2).to(torch.float8_e4m3fn)


@triton.jit
def convert(codes, first, second, N: tl.constexpr):
    """Of all pairs of codes."""
    at = tl.arange(0, N)
    a, b = _halves(tl.load(codes + at), "plain")
    tl.store(first + at, a)
    tl.store(second + at, b)


def test_every_code_becomes_its_value():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # not a number
    pairs = torch.stack([codes, codes.flip(0)], dim=1).contiguous()
    first, second = torch.empty(256, dtype=torch.float16), torch.empty(256, dtype=torch.float16)
    padded = torch.zeros(256, dtype=torch.int16)
    padded[: len(codes)] = pairs.view(torch.int16).flatten()
    convert[(1,)](padded, first, second, N=256)
    wanted = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(first[: len(codes)].float() * 256, wanted)
    assert torch.equal(second[: len(codes)].float() * 256, wanted.flip(0))


def plain(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and LSE of plain attention."""
    return plain_decode(*given, SCALES, SIZE**-0.5)


def pages_of(kv_heads: int, earlier: int, layout: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of pages for ``LENGTHS`` tokens behind ``earlier`` pages of each sequence, and the tables."""
    n, pages = len(LENGTHS), earlier + -(-max(LENGTHS) // PAGE)
    order = (kv_heads, PAGE) if layout == "heads first" else (PAGE, kv_heads)
    cache = fp8(1 + n * pages, *order, 2 * SIZE, seed=seed)
    by_token = cache.transpose(1, 2) if layout == "heads first" else cache
    keys, values = by_token.split(SIZE, dim=-1)
    tables = (torch.randperm(n * pages, generator=torch.Generator().manual_seed(1)) + 1).int().view(n, pages)
    return keys, values, tables


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "splits", "layout"),
    [
        (8, 2, 32, 1, "heads first"),
        (8, 1, 32, 4, "tokens first"),
        (4, 1, 64, 1, "tokens first"),
        (4, 1, 16, 2, "heads first"),
    ],
)
def test_the_kernel_attends_as_plain_attention(heads, kv_heads, block, splits, layout):
    """Lengths that are no multiple of anything, parts without a token, and blocks smaller and larger than a page."""
    n = len(LENGTHS)
    keys, values, tables = pages_of(kv_heads, 0, layout, seed=heads)
    query, lengths = fp8(n, heads, SIZE, seed=1), torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = torch.full((n, heads, SIZE), torch.nan), torch.full((heads, n), torch.nan)
    variant = Variant("plain", block=block, splits=splits)
    decode(query, keys, values, tables, lengths, SCALES, SIZE**-0.5, out, lse, variant=variant)

    wanted, wanted_lse = plain(query, keys, values, tables, lengths)
    there = lengths > 0
    torch.testing.assert_close(lse[:, there], wanted_lse[:, there], atol=1e-4, rtol=1e-4)
    # weights are rounded to FP16
    torch.testing.assert_close(out[there], wanted[there], atol=2e-3, rtol=2e-3)
    assert (out[~there] == 0).all() and (lse[:, ~there] == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 4])
def test_the_kernel_goes_on_from_a_result_over_earlier_tokens(splits):
    """Some sequences have one, in another order; a row whose LSE is not finite counts for nothing, NaN as it is."""
    n, heads, kv_heads, earlier = len(LENGTHS), 8, 2, 2  # pages
    keys, values, tables = pages_of(kv_heads, earlier, "heads first", seed=3)
    query, own = fp8(n, heads, SIZE, seed=1), torch.tensor(LENGTHS, dtype=torch.int32)
    has = torch.tensor([True, False, True, True, False])  # the third has nothing else
    rows = torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32)  # the last one's is without tokens

    shared_out, shared_lse = plain(query, keys, values, tables, torch.full((n,), earlier * PAGE))
    before = Before(rows, torch.full((4, heads, SIZE), torch.nan), torch.full((4, heads), torch.nan).transpose(0, 1))
    for sequence in has.nonzero().flatten().tolist():
        before.out[rows[sequence]], before.lse[:, rows[sequence]] = shared_out[sequence], shared_lse[:, sequence]
    before.lse[:, 2] = -torch.inf
    out, lse = torch.full((n, heads, SIZE), torch.nan), torch.full((heads, n), torch.nan)
    tail = tables[:, earlier:]
    decode(query, keys, values, tail, own, SCALES, SIZE**-0.5, out, lse, before, Variant("plain", 32, splits=splits))

    whole, whole_lse = plain(query, keys, values, tables, own + earlier * PAGE)
    alone, alone_lse = plain(query, keys, values, tail.contiguous(), own)
    torch.testing.assert_close(lse, torch.where(has, whole_lse, alone_lse), atol=1e-4, rtol=1e-4)
    wanted = torch.where(has[:, None, None], whole, alone)
    torch.testing.assert_close(out, wanted, atol=2e-3, rtol=2e-3)


def test_a_small_batch_is_cut_into_parts_that_fill_a_gpu():
    assert [splits_of(n, 8) for n in (256, 128, 100, 32, 2)] == [1, 1, 2, 4, 32]


def test_what_a_tile_has_no_rows_for_is_refused():
    cache = fp8(2, PAGE, 1, SIZE, seed=1)
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="32 query heads of 128 numbers for 1 KV heads"):
        decode(
            fp8(1, 32, SIZE, seed=1), cache, cache, one, one[0], SCALES, 1.0,
            torch.empty(1, 32, SIZE),
        )  # fmt: skip
