"""The decode kernel for an FP8 cache as it is compiled: no farther from fp32 than FP16 products are."""

import pytest
import torch

from rollout_service.engine.attention.fp8_decode import SIZE, Variant, decode
from tests.interpreted.plain_decode import plain_decode

CUDA = torch.device("cuda")
LENGTHS = (1, 0, 63, 64, 65, 700, 1000, 2000)


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's")


@pytest.mark.parametrize(
    "variant", [Variant(), Variant("bits", warps=2), Variant("plain", block=32, splits=4)], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 8), (32, 4)])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_the_kernel_attends_as_fp32_attention(variant, heads, kv_heads, page, tokens_first):
    """What lies behind a sequence's end is NaN; scales are read when the kernel runs."""
    torch.manual_seed(heads)
    n, pages = len(LENGTHS), -(-max(LENGTHS) // page)
    tables = (torch.randperm(n * pages, device=CUDA) + 1).int().view(n, pages)
    cache = torch.randn(1 + n * pages, page, kv_heads, 2 * SIZE, device=CUDA)
    for table, length in zip(tables.tolist(), LENGTHS, strict=True):
        for i, block in enumerate(table):
            cache[block, max(0, length - i * page) :] = torch.nan
    stored = (
        cache.to(torch.float8_e4m3fn) if tokens_first else cache.transpose(1, 2).contiguous().to(torch.float8_e4m3fn)
    )
    keys, values = (stored if tokens_first else stored.transpose(1, 2)).split(SIZE, dim=-1)
    query = torch.randn(n, heads, SIZE, device=CUDA).to(torch.float8_e4m3fn)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    q, k, v = (torch.ones((), device=CUDA) for _ in range(3))
    out = torch.full((n, heads, SIZE), torch.nan, device=CUDA, dtype=torch.bfloat16)
    lse = torch.full((heads, n), torch.nan, device=CUDA)
    for scale, value in ((q, 0.5), (k, 2.0), (v, 0.25)):
        scale.fill_(value)
    decode(query, keys, values, tables, lengths, (q, k, v), SIZE**-0.5, out, lse, variant=variant)

    wanted, wanted_lse = plain_decode(query, keys, values, tables, lengths, (q, k, v), SIZE**-0.5)
    there = lengths > 0
    torch.testing.assert_close(lse[:, there], wanted_lse.to(CUDA)[:, there], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(out[there].float(), wanted[there], atol=4e-3, rtol=1e-2)  # BF16 results
    assert (out[~there] == 0).all() and (lse[:, ~there] == -torch.inf).all()
