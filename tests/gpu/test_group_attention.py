"""A group's prompt read once, with FlashAttention 3: as plain decode computes it, alone and in whole engines.

Head sizes and ratios beside those of ``choice.py`` are computed too: what is right here may be measured, and then
allowed there.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rollout_service.engine.attention.decoding import FlashAttend, chunk_sequences, grouped_decode, splits
from rollout_service.engine.attention.grouping import Grouped, Grouping
from rollout_service.protocol.sampling import Sampling
from tests.interpreted.plain_decode import plain_decode
from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, running
from tests.support.reference import reference_logprobs, reference_model
from tests.support.shared_pages import Batch, batch_of, expected_groups, found_groups

CUDA = torch.device("cuda")
PAGE = 64
PROMPT = [f"prompt {i}" for i in range(20)]
OTHER = [f"other {i}" for i in range(9)]
SEQUENCES = [
    *[(PROMPT, 65 * i + 1) for i in range(20)],
    *[(PROMPT[:4] + OTHER, 7 * i + 64) for i in range(5)],
    ([], 1),
    ([], 3000),
]


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is Hopper's")


def shuffled(page: int = PAGE, padding: int = 5) -> Batch:
    """Groups of several sizes whose members stand anywhere."""
    sequences = random.Random(0).sample(SEQUENCES, len(SEQUENCES))
    made = batch_of(sequences, page, padding=padding, width=256)
    return Batch(page, made.tables.cuda(), made.lengths.cuda())


def random_cache(batch: Batch, kv_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """As vLLM has it: [pages, heads, tokens of a page, 2 × size]."""
    shape = (int(batch.tables.max()) + 1, kv_heads, batch.page, 2 * size)
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16).to(dtype)


def flash(kernel: Callable[..., Any], cache: torch.Tensor, batch: Batch, size: int, rows: int) -> FlashAttend:
    """What attends; with a schedule of the kernel's own."""
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    scales = (0.5, 2.0, 0.25) if cache.dtype == torch.float8_e4m3fn else (1.0, 1.0, 1.0)
    q, k, v = (torch.tensor(scale, device=CUDA) for scale in scales)
    return FlashAttend(kernel, keys, values, size**-0.5, (q, k, v), int(batch.lengths.max()), None, splits(rows, 32))


def exact(query: torch.Tensor, attend: FlashAttend, batch: Batch) -> torch.Tensor:
    """In fp32, each sequence alone; 0 for padding, which has no tokens."""
    output, _ = plain_decode(
        query, attend.keys, attend.values, batch.tables, batch.lengths, attend.descales, attend.scale
    )
    return output.nan_to_num(0.0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(32, 8, 128), (32, 4, 128), (28, 4, 128), (32, 8, 64), (4, 1, 128)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [16, 64])
def test_groups_attend_as_near_to_fp32_as_plain_decode(heads, kv_heads, size, dtype, page):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(heads)
    batch = shuffled(page)
    cache = random_cache(batch, kv_heads, size, dtype)
    count, pages = batch.tables.shape
    query = torch.randn(count, heads, size, device=CUDA, dtype=torch.bfloat16).to(dtype)
    grouped = Grouping(count, pages, page, chunk_sequences(heads, kv_heads), 2, CUDA).group(batch.tables, batch.lengths)
    attend = flash(flash_attn_varlen_func, cache, batch, size, grouped.rows)
    output, plain = (torch.full((count, heads, size), torch.nan, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    grouped_decode(query, grouped, attend, output)

    alone = torch.arange(count + 1, device=CUDA, dtype=torch.int32)
    none, own = torch.full_like(alone[1:], -1), alone[:-1].contiguous()
    each = Grouped(alone, batch.lengths, batch.tables, 1, none, own)
    grouped_decode(query, each, attend, plain)
    wanted = exact(query, attend, batch)
    largest = wanted.abs().amax()
    errors = [float((found.float() - wanted).abs().amax() / largest) for found in (plain, output)]
    assert errors[1] <= 0.005 + 1.5 * errors[0], errors


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_grouping_finds_what_comparing_prefixes_finds(seed):
    choose = random.Random(seed)
    page, chunk = choose.choice([16, 64]), choose.choice([8, 9, 16])
    paths = [[f"{i}" for i in range(choose.randrange(1, 100))] for _ in range(8)]
    paths += [paths[0][: choose.randrange(1, len(paths[0]) + 1)] + [f"{n}.{i}" for i in range(90)] for n in range(8)]
    batch = batch_of([(choose.choice(paths), choose.randrange(1, 900)) for _ in range(250)], page, padding=6)
    made = Grouping(300, batch.tables.shape[1], page, chunk, 3, CUDA).group(batch.tables.cuda(), batch.lengths.cuda())
    starts, lengths, tables, shared, own = (
        t.cpu() for t in (made.starts, made.lengths, made.tables, made.shared_rows, made.own_rows)
    )
    made = Grouped(starts, lengths, tables, chunk, shared, own)
    assert found_groups(batch, made) == expected_groups(batch, chunk, 3)


def test_the_grouping_never_waits_for_the_gpu():
    batch = shuffled()
    grouping = Grouping(64, batch.tables.shape[1], PAGE, 16, 2, CUDA)
    grouping.group(batch.tables, batch.lengths)
    grouping.reads.read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouping.group(batch.tables, batch.lengths)
        grouping.reads.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_read_and_what_is_not_is_counted():
    """Also where a CUDA graph of another batch is in between: the counter is of the groupings alone."""
    batch = shuffled()
    grouping = Grouping(64, batch.tables.shape[1], PAGE, 16, 2, CUDA)
    for _ in range(3):
        made = grouping.group(batch.tables, batch.lengths)
    attended, spared = grouping.reads.counts.tolist()
    assert attended == 3 * int(batch.lengths.sum())
    assert attended - spared == 3 * int(made.lengths.sum())
    assert spared > 0
    assert grouping.reads.read() == (0, 0)
    torch.cuda.synchronize()
    assert grouping.reads.read() == (attended, spared)


def test_one_graph_serves_batches_that_share_more_and_less():
    """Captured without a group, as vLLM does; then members come, diverge and leave."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch = shuffled()
    count, heads = len(batch.lengths), 32
    cache = random_cache(batch, 8, 128, torch.bfloat16)
    query = torch.randn(count, heads, 128, device=CUDA, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    tables, lengths = torch.zeros_like(batch.tables), torch.ones_like(batch.lengths)
    grouping = Grouping(64, batch.tables.shape[1], PAGE, 16, 2, CUDA)
    attend = flash(flash_attn_varlen_func, cache, batch, 128, 2 * count)
    grouped = grouping.group(tables, lengths)
    grouped_decode(query, grouped, attend, output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_decode(query, grouped, attend, output)
    for gone in (0, 7, count - 1):
        tables.copy_(batch.tables)
        lengths.copy_(batch.lengths)
        tables[count - gone :], lengths[count - gone :] = 0, 0
        grouping.group(tables, lengths)
        graph.replay()
        wanted = exact(query, attend, Batch(PAGE, tables, lengths))
        torch.testing.assert_close(output.float(), wanted, atol=0.02, rtol=0.02)


def make_wide_heads(folder: Path, size: str) -> Path:
    """A small Qwen3 with heads of so many numbers and four query heads of each KV head."""
    config = Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=int(size), max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


async def differences(one: OneEngine, folder: Path) -> tuple[torch.Tensor, list[int], tuple[int, int]]:
    """Of decoded logprobs from the fp32 reference; sequences that shared pages in the last step; and what was read."""
    numbers = random.Random(1)
    system = [numbers.randrange(3, 128) for _ in range(530)]
    prompts = [[*system, *(numbers.randrange(3, 128) for _ in range(length))] for length in (110, 64, 200)]
    sampling = Sampling(n=6, max_tokens=24, temperature=1.0, ignore_eos=True)
    answers = await asyncio.gather(*(one.engine.generate(f"g{i}", tuple(p), sampling) for i, p in enumerate(prompts)))
    reference = reference_model(one.config.model.path, folder, fp8_activations=True, fp8_kv=True)
    found = [
        reference_logprobs(reference, tuple(prompt), c.token_ids, 1.0) - torch.tensor(c.logprobs)
        for prompt, completions in zip(prompts, answers, strict=True)
        for c in completions
    ]
    shared = await one.engine.ask_workers("sequences_that_share")
    await one.engine.kv_reads()
    return torch.cat(found), shared, await one.engine.kv_reads()


@pytest.mark.parametrize(
    ("size", "gpus"),
    [
        (128, 1),
        (64, 1),
        pytest.param(128, 2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    ],
)
async def test_an_engines_logprobs_are_as_near_to_the_reference_as_flash_attentions(size, gpus, tmp_path, monkeypatch):
    """18 sequences in three groups with a common system prompt; ours in whole CUDA graphs of 16 and 32 sequences."""
    means, shared = {}, {}
    for backend, graphs in {"FLASH_ATTN": {"enforce_eager": True}, "group": {"cuda_graph_sizes": (16, 32)}}.items():
        settings: dict[str, Any] = {
            "attention_backend": backend, "kv_cache_dtype": "fp8_e4m3", "linear_backend": "cutlass",
            "gpu_memory_utilization": 0.1, "max_model_len": 1024, "max_num_seqs": 32,
            "tensor_parallel_size": gpus, "extra": {"kv_cache_memory_bytes": 256 << 20},
        }  # fmt: skip
        home = tmp_path / backend
        home.mkdir()
        async with running(str(size), home, monkeypatch, make=make_wide_heads, **settings, **graphs) as one:
            folder = await one.update(1, random_weights(one.config.model.path, seed=1))
            found, ranks, reads = await differences(one, folder)
            [shared[backend]] = set(ranks)  # all ranks group alike
            assert one.engine.attention_backends == (backend,)
            assert (reads == (0, 0)) if backend == "FLASH_ATTN" else (reads[0] > reads[1] > 0), reads
            means[backend] = float(found.abs().mean())
    assert shared["FLASH_ATTN"] == 0 and shared["group"] >= 6, shared
    assert means["group"] <= 0.002 + 1.25 * means["FLASH_ATTN"], means
