"""Decode attention that reads a group's common prompt once, against reading it for each sequence; on a Hopper GPU.

    python -m benchmarks.kernels.group_attention --limit-s 60
    python -m benchmarks.kernels.group_attention --model qwen3-8b --kv fp8 --case 16x4096+512 --case 8x1024+2048

The attention alone, without an engine. ``--sequences`` decode one token each, in groups whose prompt is the same pages;
a case is ``sequences of a group x tokens of its prompt + tokens of each's own``. One side is FlashAttention 3 as vLLM
0.32 calls it, the other one this package's kernels, layer by layer as its backend runs them: queries to their rows,
FlashAttention, parts merged; of an FP8 cache FlashAttention reads what is shared, and the decode kernel the rest. Both
run in CUDA graphs over ``LAYERS`` layers whose caches are larger than the GPU's L2. What is done once a step comes
apart: the grouping, on the GPU and until it is launched. Each case is written as soon as it is there, and the most
wanted come first; one whose result is wrong is not written, and ends the command with 1.
"""

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.timing import graph_seconds, wall_seconds
from benchmarks.kernels.attention import HEAD_DIM, HEADS
from rollout_service.engine.attention.choice import MIN_SHARED_TOKENS
from rollout_service.engine.attention.decoding import FP8Cache, grouped_decode, grouped_fp8_decode
from rollout_service.engine.attention.flash import FlashAttend, chunk_sequences, splits
from rollout_service.engine.attention.fp8_decode import Variant, splits_of
from rollout_service.engine.attention.grouping import Entries, Grouped, Grouping

RESULT = "kernels_group_attention"
LAYERS = 4
REPEATS = 7
SPLITS = 32
"""vLLM's bound for CUDA graphs."""
SAME = ("model", "kv", "sequences", "group", "prompt_tokens", "own_tokens", "page_tokens")
_CASE = re.compile(r"(\d+)x(\d+)\+(\d+)")


class Cache(StrEnum):
    """What keys, values and queries are in."""

    FP8 = "fp8"
    BF16 = "bf16"


class GroupOptions(Options):
    """What is measured; most may be repeated."""

    model: tuple[str, ...] = ("qwen3-8b", "qwen3-30b-a3b")
    """Whose heads."""
    kv: tuple[Cache, ...] = tuple(Cache)
    """Of the cache."""
    case: tuple[str, ...] = (
        *("16x4096+512", "16x1024+2048", "8x4096+1024", "1x4096+512", "16x1024+512"),
        *("16x8192+512", "4x512+2048", "256x1024+512", "4x4096+512"),
    )
    """Sequences of a group x tokens of its prompt + own tokens of each."""
    sequences: int = 256
    """Of a step."""
    page: tuple[int, ...] = (64,)
    """Tokens of a page."""
    splits: int = SPLITS
    """Parts that FlashAttention may cut an entry's tokens into, for groups; fewer for large batches anyway."""
    limit_s: float = 120.0
    """No case is begun after so many seconds."""

    def sizes(self) -> list[tuple[int, int, int]]:
        """Of each case: group, prompt, own. Raises ValueError for one that is none."""
        found = [(each, _CASE.fullmatch(each)) for each in self.case]
        if wrong := [each for each, match in found if match is None]:
            raise ValueError(f"--case {wrong[0]}: give it as 16x4096+512")
        sizes = [tuple(map(int, match.groups())) for _, match in found if match is not None]
        return [(group, prompt, own) for group, prompt, own in sizes]


@dataclass
class Case:
    """One kind of batch with both sides' figures."""

    model: str
    kv: str
    sequences: int
    group: int
    prompt_tokens: int
    own_tokens: int
    page_tokens: int
    splits: int
    """Of groups."""
    own_kernel: str
    """What reads each sequence's own tokens."""
    plain_us: float
    """Of a layer."""
    grouped_us: float
    """Of a layer, all kernels."""
    around_us: float
    """Of that, without FlashAttention."""
    grouping_us: float
    """Of a step, on the GPU."""
    launching_us: float
    """Of the same, until the CPU has launched it."""
    plain_error: float
    """Largest difference of some rows from fp32, to the largest result."""
    grouped_error: float
    """Likewise."""

    @property
    def is_right(self) -> bool:
        """Whether it is as near to fp32 as FlashAttention is, as far as so few rows tell."""
        return self.grouped_error <= 0.02 + 2 * self.plain_error

    @property
    def ratio(self) -> float:
        """How much shorter a layer's attention is."""
        return self.plain_us / self.grouped_us


@dataclass(frozen=True)
class Batch:
    """Queries, caches of all layers, and who has which pages."""

    query: torch.Tensor
    caches: torch.Tensor
    """[layers, pages, KV heads, tokens of a page, 2 × size]."""
    tables: torch.Tensor
    lengths: torch.Tensor
    page: int

    @property
    def parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [pages, tokens, heads, size] of each layer."""
        return [cache.transpose(1, 2).split(HEAD_DIM, dim=-1) for cache in self.caches]

    @cached_property
    def longest(self) -> int:
        """In tokens; the first time waits for the GPU."""
        return int(self.lengths.max())


def batch_of(
    query_and_kv_heads: tuple[int, int], kv: str, sequences: int, sizes: tuple[int, int, int], page: int
) -> Batch:
    """Random numbers; pages lie anywhere, and members of a group anywhere in the batch.

    ``sizes``: sequences of a group, tokens of its prompt, and own ones of each.
    """
    group, prompt, own = sizes
    heads, kv_heads = query_and_kv_heads
    groups, shared, private = -(-sequences // group), prompt // page, -(-own // page)
    dtype = torch.float8_e4m3fn if kv == Cache.FP8 else torch.bfloat16
    pages = groups * shared + sequences * private
    caches = torch.empty(LAYERS, 1 + pages, kv_heads, page, 2 * HEAD_DIM, dtype=dtype, device="cuda")
    for part in (part for cache in caches for part in cache.split(2048)):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device="cuda"))
    ids = torch.randperm(pages, device="cuda", dtype=torch.int32) + 1
    prompts = ids[: groups * shared].view(groups, shared)
    members = torch.randperm(sequences, device="cuda") // group
    tables = torch.cat([prompts[members], ids[groups * shared :].view(sequences, private)], 1).contiguous()
    spread = torch.randint(0, min(page, own), (sequences,), device="cuda", dtype=torch.int32)
    query = (2 * torch.randn(sequences, heads, HEAD_DIM, device="cuda")).bfloat16().to(dtype)
    return Batch(query, caches, tables, prompt + own - spread, page)


def schedule_of(batch: Batch, grouped: Entries | None, most_splits: int) -> torch.Tensor:
    """FlashAttention's: of entries, or of the batch as it is."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    count, heads, _ = batch.query.shape
    schedule: torch.Tensor = get_scheduler_metadata(
        batch_size=count if grouped is None else len(grouped),
        max_seqlen_q=1 if grouped is None else grouped.max_rows,
        max_seqlen_k=batch.longest,
        num_heads_q=heads,
        num_heads_kv=batch.caches.shape[2],
        headdim=HEAD_DIM,
        cache_seqlens=batch.lengths if grouped is None else grouped.lengths,
        qkv_dtype=batch.query.dtype,
        cu_seqlens_q=starts_of(batch) if grouped is None else grouped.starts,
        page_size=batch.page,
        causal=grouped is None,
        num_splits=most_splits,
    )
    return schedule


def starts_of(batch: Batch) -> torch.Tensor:
    """A row a sequence."""
    return torch.arange(len(batch.query) + 1, dtype=torch.int32, device="cuda")


def plain_calls(batch: Batch, output: torch.Tensor) -> list[Callable[[], object]]:
    """Each layer's attention as vLLM's backend calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    schedule, starts = schedule_of(batch, None, SPLITS), starts_of(batch)
    scale = torch.ones((), device="cuda").expand(len(batch.query), batch.caches.shape[2])

    def call(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], object]:
        return lambda: flash_attn_varlen_func(
            q=batch.query, k=keys, v=values, out=output, cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=batch.lengths, max_seqlen_k=batch.longest, softmax_scale=HEAD_DIM**-0.5, causal=True,
            block_table=batch.tables, scheduler_metadata=schedule, fa_version=3, num_splits=SPLITS,
            q_descale=scale, k_descale=scale, v_descale=scale,
        )  # fmt: skip

    return [call(keys, values) for keys, values in batch.parts]


def grouped_calls(
    batch: Batch, grouped: Grouped, output: torch.Tensor, most_splits: int, *, attends: bool
) -> list[Callable[[], object]]:
    """Each layer's as our backend runs it; without ``attends`` all but the attention."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    one = torch.ones((), device="cuda")
    count, heads, _ = batch.query.shape
    is_fp8 = batch.query.dtype == torch.float8_e4m3fn
    schedule = schedule_of(batch, grouped.shared if is_fp8 else grouped, most_splits)
    lse = torch.zeros(heads, count if is_fp8 else grouped.rows, device="cuda")
    variant = Variant(splits=splits_of(count, batch.caches.shape[2]))

    def call(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], object]:
        attend = FlashAttend(
            flash_attn_varlen_func, keys, values, HEAD_DIM**-0.5, (one, one, one), batch.longest, schedule, most_splits
        )
        way = attend if attends else lambda rows, batch, output: lse
        if not is_fp8:
            return lambda: grouped_decode(batch.query, grouped, way, output)
        cache = FP8Cache(keys, values, (one, one, one), HEAD_DIM**-0.5, variant)
        return lambda: grouped_fp8_decode(batch.query, grouped, way, cache, output)

    return [call(keys, values) for keys, values in batch.parts]


def exact(batch: Batch, row: int) -> torch.Tensor:
    """The last layer's attention of one sequence, fp32 [heads, size]."""
    cache = batch.caches[-1]
    raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    tokens, heads = int(batch.lengths[row]), cache.shape[1]
    pages = raw[batch.tables[row, : -(-tokens // batch.page)].long()].view(cache.dtype).float()
    keys, values = pages.transpose(0, 1).reshape(heads, -1, 2 * HEAD_DIM)[:, :tokens].split(HEAD_DIM, dim=-1)
    logits = batch.query[row].float().view(heads, -1, HEAD_DIM) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
    return (logits.softmax(-1) @ values).reshape(-1, HEAD_DIM)


def error_of(output: torch.Tensor, batch: Batch) -> float:
    """Largest difference of a few rows from ``exact``, to the largest number there."""
    rows = sorted({0, len(output) // 2, len(output) - 1})
    wanted = torch.stack([exact(batch, row) for row in rows])
    return float((output[rows].float() - wanted).abs().max() / wanted.abs().max())


def measure(model: str, kv: str, sequences: int, sizes: tuple[int, int, int], page: int, most_splits: int) -> Case:
    """Both sides of one kind of batch."""
    batch = batch_of(HEADS[model], kv, sequences, sizes, page)
    heads, kv_heads = HEADS[model]
    chunk, fewest = chunk_sequences(heads, kv_heads), -(-MIN_SHARED_TOKENS // page)
    grouping = Grouping(sequences, batch.tables.shape[1], page, chunk, fewest, torch.device("cuda"))

    def group() -> Grouped:
        return grouping.group(batch.tables, batch.lengths)

    grouped = group()
    parts = splits(sequences if kv == Cache.FP8 else grouped.rows, most_splits)
    outputs = [torch.empty(batch.query.shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    calls = (
        plain_calls(batch, outputs[0]),
        grouped_calls(batch, grouped, outputs[1], parts, attends=True),
        grouped_calls(batch, grouped, outputs[2], parts, attends=False),
    )
    plain, together, around = (1e6 * statistics.median(graph_seconds(each, REPEATS)) for each in calls)
    on_gpu = 1e6 * statistics.median(graph_seconds([group], REPEATS))
    launched = 1e6 * statistics.median(wall_seconds(group, 20))
    torch.cuda.synchronize()
    errors = (error_of(outputs[0], batch), error_of(outputs[1], batch))
    own = "fp8_decode" if kv == Cache.FP8 else "FlashAttention 3"
    return Case(model, kv, sequences, *sizes, page, parts, own, plain, together, around, on_gpu, launched, *errors)


def cases(wanted: GroupOptions) -> Iterator[Case]:
    """One after the other, until the time is up."""
    until = time.monotonic() + wanted.limit_s
    for sizes, model, kv, page in itertools.product(wanted.sizes(), wanted.model, wanted.kv, wanted.page):
        if time.monotonic() > until:
            return
        case = measure(model, kv, wanted.sequences, sizes, page, wanted.splits)
        torch.cuda.empty_cache()  # the graphs' own pools
        yield case


def table_of(found: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"decode attention of groups on {results.machine()}, µs a layer")
    columns = ("model", "KV", "page", "group", "prompt", "own", "plain", "grouped", "ratio", "around", "grouping")
    for column in (*columns, "launched", "error"):
        table.add_column(column, justify="left" if column in ("model", "KV") else "right")
    for c in found:
        sizes = (str(c.page_tokens), str(c.group), str(c.prompt_tokens), str(c.own_tokens))
        times = (f"{c.plain_us:.1f}", f"{c.grouped_us:.1f}", f"{c.ratio:.2f}", f"{c.around_us:.1f}")
        once = (f"{c.grouping_us:.0f}", f"{c.launching_us:.0f}")
        table.add_row(c.model, c.kv, *sizes, *times, *once, f"{c.plain_error:.4f} {c.grouped_error:.4f}")
    return table


def main(wanted: GroupOptions) -> None:
    """Measure, print the table, and add each case to benchmarks/results/<machine>/kernels_group_attention.json."""
    console, found = Console(), list[Case]()
    wanted.sizes()
    for case in cases(wanted):
        found.append(case)
        if case.is_right:
            fresh = [asdict(case) | {"ratio": case.ratio}]
            results.write(RESULT, {"cases": results.joined(results.cases(RESULT), fresh, SAME), "layers": LAYERS})
        console.print(f"{case.model} {case.kv} {case.group}x{case.prompt_tokens}+{case.own_tokens}: {case.ratio:.2f}")
    console.print(table_of(found))
    console.print(f"added to {results.path(RESULT)}")
    if wrong := [case for case in found if not case.is_right]:
        console.print(f"wrong results, not written: {wrong}")
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
