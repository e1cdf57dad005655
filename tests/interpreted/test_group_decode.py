"""A group's prompt read once gives the attention that reading it for each sequence gives: Triton's interpreter, with a
plain attention in FlashAttention's place that takes the same arguments."""

import pytest
import torch

from rollout_service.engine.attention.decoding import FlashAttend, chunk_sequences, grouped_decode, splits
from rollout_service.engine.attention.grouping import Grouping
from rollout_service.engine.attention.merging import merge, spread
from tests.interpreted.plain_decode import plain_decode
from tests.support.shared_pages import Batch, batch_of, paged_attention

PAGE = 16
CPU = torch.device("cpu")
PROMPT = [f"prompt {i}" for i in range(3)]
SYSTEM = PROMPT[:1]
SEQUENCES = [(PROMPT, 5), ([], 40), (PROMPT, 16), ([*SYSTEM, "x", "y"], 9), (PROMPT, 31), ([*SYSTEM, "x", "y"], 1)]


def pages_of(batch: Batch, heads: int, size: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [pages, tokens of a page, heads, size], as views of a cache in one of vLLM's layouts."""
    pages = int(batch.tables.max()) + 1
    shape = (pages, heads, PAGE, 2 * size) if layout == "HND" else (pages, PAGE, heads, 2 * size)
    cache = torch.randn(shape).to(dtype)
    cache = cache.transpose(1, 2) if layout == "HND" else cache
    keys, values = cache.split(size, dim=-1)
    return keys, values


def plain(query: torch.Tensor, attend: FlashAttend, batch: Batch) -> torch.Tensor:
    """A row a sequence, against its whole table, in one pass; 0 for padding, which has no tokens."""
    out, _ = plain_decode(query, attend.keys, attend.values, batch.tables, batch.lengths, attend.descales, attend.scale)
    return out.nan_to_num(0.0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "layout"),
    [
        (8, 2, 128, torch.float32, "NHD"),
        (8, 1, 64, torch.float32, "HND"),
        (14, 2, 128, torch.float32, "HND"),
        (4, 4, 64, torch.float32, "NHD"),
        (8, 2, 128, torch.float8_e4m3fn, "HND"),
    ],
)
def test_groups_attend_as_each_sequence_alone_would(heads, kv_heads, size, dtype, layout):
    torch.manual_seed(heads)
    batch = batch_of(SEQUENCES, PAGE, padding=1)
    batch.tables[4, 1] = batch.tables[1, 0]  # one whose prompt was computed twice in part
    keys, values = pages_of(batch, kv_heads, size, dtype, layout)
    scales = (0.5, 2.0, 0.25) if dtype == torch.float8_e4m3fn else (1.0, 1.0, 1.0)
    descales = (torch.tensor(scales[0]), torch.tensor(scales[1]), torch.tensor(scales[2]))
    attend = FlashAttend(paged_attention, keys, values, size**-0.5, descales, int(batch.lengths.max()), None, 8)
    count, pages = batch.tables.shape
    # queries lie among keys and values, as a model's fused projection leaves them
    query = torch.randn(count, 2 * heads, size).to(dtype)[:, :heads]
    grouping = Grouping(count, pages, PAGE, max(2, chunk_sequences(heads, kv_heads)), 1, CPU)
    output = torch.full((count, heads, size), float("nan"))
    grouped = grouping.group(batch.tables, batch.lengths)
    assert int((grouped.shared_rows >= 0).sum()) >= 4
    grouped_decode(query, grouped, attend, output)
    torch.testing.assert_close(output, plain(query, attend, batch), atol=2e-6, rtol=2e-6)


def test_queries_reach_their_rows_and_no_others():
    query = torch.randn(3, 5, 32)
    rows = torch.full((6, 5, 32), 7.0)
    shared, own = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([2, 3, -1], dtype=torch.int32)
    spread(query, rows, shared, own)
    torch.testing.assert_close(
        rows, torch.stack([query[2], query[0], query[0], query[1], *[torch.full((5, 32), 7.0)] * 2])
    )


def test_parts_weigh_as_the_sums_of_their_exponentials():
    partial = torch.randn(4, 9, 32)
    lse = torch.randn(4, 9).transpose(0, 1) * 30  # FlashAttention's shape, with other strides
    shared, own = torch.tensor([3, -1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    output = torch.empty(2, 9, 32, dtype=torch.bfloat16)
    merge(partial, lse, shared, own, output)
    weight = torch.stack([lse[:, 3], lse[:, 0]]).softmax(0)[..., None]
    expected = torch.stack([weight[0] * partial[3] + weight[1] * partial[0], partial[1]])
    torch.testing.assert_close(output, expected.bfloat16(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("nothing", [float("-inf"), float("inf"), float("nan")])
def test_a_part_without_tokens_weighs_nothing(nothing):
    """Whatever stands in its row. FlashAttention 2 gives +inf as its LSE, 3 gives −inf."""
    partial = torch.randn(4, 2, 32)
    partial[0] = float("nan")
    lse = torch.zeros(2, 4)
    lse[:, 0] = nothing
    none = torch.tensor([-1, -1, 0, 0], dtype=torch.int32)
    own = torch.tensor([1, -1, 2, 0], dtype=torch.int32)
    output = torch.empty(4, 2, 32)
    merge(partial, lse, none, own, output)
    zero = torch.zeros(2, 32)
    torch.testing.assert_close(output, torch.stack([partial[1], zero, partial[2], zero]))


def test_heads_that_do_not_lie_side_by_side_are_refused():
    rows = torch.zeros(3, 4, 32)
    numbers = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"heads of 32 numbers lie \(1, 4\) apart, and \(32, 1\) is expected"):
        spread(torch.zeros(3, 32, 4).transpose(1, 2), rows, numbers, numbers)


@pytest.mark.parametrize(("heads", "kv_heads", "sequences"), [(32, 8, 16), (32, 4, 8), (28, 4, 9), (8, 8, 64)])
def test_a_chunk_fills_a_tile_of_packed_rows(heads, kv_heads, sequences):
    assert chunk_sequences(heads, kv_heads) == sequences


def test_larger_batches_are_split_into_fewer_parts():
    assert [splits(rows, 32) for rows in (2, 128, 256, 512, 1024)] == [32, 32, 16, 8, 8]
    assert splits(512, 4) == 4
