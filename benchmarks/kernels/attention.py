"""Decode attention alone: how fast each of vLLM's kernels reads the KV cache, by its dtype and page size; on a GPU.

    python -m benchmarks.kernels.attention

One decode step of one layer: ``--sequences`` queries of one token against ``--context`` tokens of KV each, in the paged
layout of vLLM 0.32. The cache of one case is larger than the GPU's L2 by far. GB/s counts keys and values once.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.timing import event_seconds

HEAD_DIM = 128
HEADS = {"qwen3-8b": (32, 8), "qwen3-30b-a3b": (32, 4)}
"""Query and KV heads."""
SEGMENTS = 16
"""vLLM's NUM_PAR_SOFTMAX_SEGMENTS."""
REPEATS = 20


class SizeOptions(Options):
    """Sizes; each may be repeated."""

    sequences: tuple[int, ...] = (256,)
    """Queries of one token each."""
    context: tuple[int, ...] = (4608,)
    """Tokens of KV that each reads."""
    pages: tuple[int, ...] = (16, 64, 128)
    """Tokens of a page."""


@dataclass
class Case:
    """One kernel on one cache."""

    model: str
    kernel: str
    kv: str
    page_tokens: int
    sequences: int
    context_tokens: int
    ms: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def gbytes(self) -> float:
        """Keys and values."""
        heads = HEADS[self.model][1]
        return 2 * heads * HEAD_DIM * self.sequences * self.context_tokens * (1 if self.kv == "fp8" else 2) / 1e9


@dataclass
class Inputs:
    """Queries, pages and who has which."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor


def inputs(case: Case) -> Inputs:
    """Random ones; pages of a sequence lie anywhere."""
    query_heads, kv_heads = HEADS[case.model]
    pages = -(-case.context_tokens // case.page_tokens)
    total = pages * case.sequences
    cache = torch.randn(total, kv_heads, case.page_tokens, 2 * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(case.sequences, query_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    if case.kv == "fp8":
        cache = cache.to(torch.float8_e4m3fn)
    keys, values = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
    return Inputs(
        query=query,
        keys=keys,
        values=values,
        table=torch.randperm(total, device="cuda", dtype=torch.int32).view(case.sequences, pages),
        lengths=torch.full((case.sequences,), case.context_tokens, device="cuda", dtype=torch.int32),
        starts=torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32),
        out=torch.empty_like(query),
    )


def flash_attention(case: Case, given: Inputs) -> Callable[[], object]:
    """FlashAttention 3, as vLLM's backend calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    query_heads, kv_heads = HEADS[case.model]
    fp8 = case.kv == "fp8"
    scale = torch.ones(1, device="cuda").expand(case.sequences, kv_heads)
    query = given.query.to(torch.float8_e4m3fn) if fp8 else given.query
    schedule = get_scheduler_metadata(
        batch_size=case.sequences,
        max_seqlen_q=1,
        max_seqlen_k=case.context_tokens,
        num_heads_q=query_heads,
        num_heads_kv=kv_heads,
        headdim=HEAD_DIM,
        cache_seqlens=given.lengths,
        qkv_dtype=query.dtype,
        cu_seqlens_q=given.starts,
        page_size=case.page_tokens,
        causal=True,
        num_splits=0,
    )
    return lambda: flash_attn_varlen_func(
        q=query,
        k=given.keys,
        v=given.values,
        out=given.out,
        cu_seqlens_q=given.starts,
        max_seqlen_q=1,
        seqused_k=given.lengths,
        max_seqlen_k=case.context_tokens,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        block_table=given.table,
        scheduler_metadata=schedule,
        fa_version=3,
        q_descale=scale if fp8 else None,
        k_descale=scale if fp8 else None,
        v_descale=scale if fp8 else None,
    )


def triton_attention(case: Case, given: Inputs) -> Callable[[], object]:
    """vLLM's unified Triton kernel, as its backend calls it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    query_heads, kv_heads = HEADS[case.model]
    scale = torch.ones(1, device="cuda").expand(case.sequences, kv_heads)
    threshold = 128 // kv_heads
    partial = torch.empty(threshold, query_heads, SEGMENTS, HEAD_DIM, device="cuda")
    extremes = torch.empty(2, threshold, query_heads, SEGMENTS, device="cuda")
    return lambda: unified_attention(
        q=given.query,
        k=given.keys,
        v=given.values,
        out=given.out,
        cu_seqlens_q=given.starts,
        max_seqlen_q=1,
        seqused_k=given.lengths,
        max_seqlen_k=case.context_tokens,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=given.table,
        softcap=0.0,
        q_descale=None,
        k_descale=scale,
        v_descale=scale,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=partial,
        softmax_segm_max=extremes[0],
        softmax_segm_expsum=extremes[1],
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if case.kv == "fp8" else KVQuantMode.NONE,
    )


KERNELS = {"flash": flash_attention, "triton": triton_attention}


def measure(case: Case) -> None:
    """Milliseconds of each of ``REPEATS`` runs."""
    try:
        call = KERNELS[case.kernel](case, inputs(case))
        call()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # not every kernel has every page size
        case.error = str(error).splitlines()[0][:200]
        return
    case.ms = [1e3 * seconds for seconds in event_seconds(call, REPEATS, queued=True)]


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"decode attention of one layer on {results.machine()}")
    for column in ("model", "kernel", "KV", "page", "sequences", "context", "ms", "GB/s"):
        table.add_column(column, justify="left" if column in ("model", "kernel", "KV") else "right")
    for c in cases:
        ms = statistics.median(c.ms) if c.ms else None
        speed = c.error if ms is None else f"{c.gbytes / ms * 1e3:.0f}"
        sizes = (str(c.page_tokens), str(c.sequences), str(c.context_tokens))
        table.add_row(c.model, c.kernel, c.kv, *sizes, "" if ms is None else f"{ms:.3f}", speed)
    return table


def main(sizes: SizeOptions) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/kernels/attention.json."""
    console, cases = Console(), []
    for parameters in itertools.product(HEADS, KERNELS, ("bf16", "fp8"), sizes.pages, sizes.sequences, sizes.context):
        case = Case(*parameters)
        measure(case)
        torch.cuda.empty_cache()
        cases.append(case)
    console.print(table_of(cases))
    content = {"cases": [asdict(case) | {"gbytes": case.gbytes} for case in cases]}
    console.print(f"wrote {results.write('kernels_attention', content)}")


if __name__ == "__main__":
    run(main)
