"""Decode batches whose sequences have pages in common, and plain ways to attend over them."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from rollout_service.engine.attention.grouping import Grouped


@dataclass
class Batch:
    """Block tables and lengths as vLLM hands them over."""

    page: int
    tables: torch.Tensor
    """int32 [sequences, pages]; behind a sequence's last page stands what was there before."""
    lengths: torch.Tensor
    """int32 [sequences]; 0: padding."""

    def pages(self, sequence: int) -> list[int]:
        """Block ids that hold its tokens."""
        return [int(i) for i in self.tables[sequence, : -(-int(self.lengths[sequence]) // self.page)]]


def batch_of(
    sequences: Sequence[tuple[Sequence[str], int]], page: int = 16, padding: int = 0, width: int | None = None
) -> Batch:
    """Of each sequence: names of leading pages, the same name for the same page, and tokens after them."""
    ids = itertools.count(1)
    named = defaultdict[str, int](lambda: next(ids))
    rows = [[named[name] for name in names] for names, _ in sequences]
    rows = [row + [next(ids) for _ in range(-(-own // page))] for row, (_, own) in zip(rows, sequences, strict=True)]
    width = width or max(map(len, rows)) + 1
    stale = next(ids)  # the same everywhere: nothing may be read off it
    tables = torch.full((len(rows) + padding, width), stale, dtype=torch.int32)
    tables[len(rows) :] = 0
    for table, row in zip(tables, rows, strict=False):
        table[: len(row)] = torch.tensor(row)
    tokens = [len(names) * page + own for names, own in sequences] + [0] * padding
    return Batch(page, tables, torch.tensor(tokens, dtype=torch.int32))


def expected_groups(batch: Batch, chunk: int, min_pages: int) -> set[tuple[tuple[int, ...], int]]:
    """Sequences of each shared entry and how many pages they share, by comparing prefixes as tuples."""
    prefixes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for sequence, length in enumerate(batch.lengths.tolist()):
        full = batch.pages(sequence)[: max(length - 1, 0) // batch.page]
        for depth in range(min_pages, len(full) + 1):
            prefixes[tuple(full[:depth])].append(sequence)
    best: dict[int, tuple[Fraction, int, tuple[int, ...]]] = {}
    for prefix, members in prefixes.items():
        sharers = min(len(members), chunk)
        saved = Fraction(len(prefix) * (sharers - 1), sharers)
        for member in members:
            if saved > 0:
                best[member] = max(best.get(member, (Fraction(0), 0, ())), (saved, len(prefix), prefix))
    choosers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for member, (_, _, prefix) in sorted(best.items()):
        choosers[prefix].append(member)
    return {
        (tuple(part), len(prefix))
        for prefix, members in choosers.items()
        for part in (members[i : i + chunk] for i in range(0, len(members), chunk))
        if len(part) > 1
    }


def found_groups(batch: Batch, made: Grouped) -> set[tuple[tuple[int, ...], int]]:
    """The same of what the kernels made. Asserts that each sequence's rows see exactly its own tokens, in order."""
    starts = made.starts.tolist()
    entry_of = {row: e for e in range(len(made)) for row in range(starts[e], starts[e + 1])}
    shared: defaultdict[int, list[int]] = defaultdict(list)
    taken: set[int] = set()
    for sequence, length in enumerate(batch.lengths.tolist()):
        rows = [int(made.shared_rows[sequence]), int(made.own_rows[sequence])]
        if length == 0:
            assert rows == [-1, -1]
            continue
        seen: list[int] = []
        tokens = 0
        for row in rows:
            if row >= 0:
                assert row not in taken
                taken.add(row)
                entry = entry_of[row]
                here = int(made.lengths[entry])
                assert here > 0
                assert tokens % batch.page == 0
                seen += made.tables[entry, : -(-here // batch.page)].tolist()
                tokens += here
        assert rows[1] >= 0
        assert starts[entry_of[rows[1]] + 1] - starts[entry_of[rows[1]]] == 1
        assert (seen, tokens) == (batch.pages(sequence), length)
        if rows[0] >= 0:
            shared[entry_of[rows[0]]].append(sequence)
    assert starts[-1] <= made.rows
    return {(tuple(members), int(made.lengths[entry]) // batch.page) for entry, members in shared.items()}


def paged_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32, with the arguments of vLLM's ``flash_attn_varlen_func``; rows that no entry has become NaN."""
    assert not causal
    page, kv_heads = k.shape[1:3]
    rows, heads, _ = q.shape
    out.fill_(float("nan"))
    lse = torch.full((heads, rows), float("nan"))
    for entry, tokens in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[entry : entry + 2].tolist()
        assert last - first <= max_seqlen_q
        assert tokens <= max_seqlen_k
        if first == last:
            continue
        pages = block_table[entry, : -(-tokens // page)].long()
        keys, values = (
            _rows(cache, pages).float().flatten(0, 1)[:tokens] * descale[entry, 0]
            for cache, descale in ((k, k_descale), (v, v_descale))
        )
        queries = q[first:last].float().unflatten(1, (kv_heads, -1)) * q_descale[entry, 0]
        logits = torch.einsum("rhgd,thd->hgrt", queries, keys) * softmax_scale
        lse[:, first:last] = logits.logsumexp(-1).flatten(0, 1)
        found = torch.einsum("hgrt,thd->rhgd", logits.softmax(-1), values)
        out[first:last] = found.flatten(1, 2).to(out.dtype)
    return out, lse


def _rows(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Torch does not index FP8."""
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    return cache.view(torch.uint8)[pages].view(cache.dtype) if is_fp8 else cache[pages]
