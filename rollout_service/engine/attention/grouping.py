"""Which sequences of a decode batch share how much of their KV cache, found on the GPU from block tables alone.

Completions of one prompt have their prompt's pages in common: the prefix cache gives each of them the same block ids.
A step's batch of ``n`` sequences becomes one of at most ``n // 2 + n`` entries. First come the *shared* entries: the
pages that up to ``chunk`` sequences have in common, with one query row for each of these sequences. Then comes each
sequence's *own* entry: the rest of its pages, with one row. Nothing here waits for the GPU or depends on values on the
host, and all that is written lies in buffers that stay where they are, so that CUDA graphs can read them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from rollout_service.engine.attention.launching import RepeatedLaunch
from rollout_service.engine.attention.reads import KVReads

MAX_PAGES = (1 << 20) - 1
MAX_SEQUENCES = 1 << 10
_KEY = tl.constexpr(MAX_PAGES + 1)
"""A key is an int32: the first sequence that has the shared pages, times this, plus their number."""
_COPY = 512
"""Block ids that a program reads at once."""


@triton.jit(do_not_specialize=["count"])
def choose_prefixes(
    tables, row_stride, lengths, count, page, min_pages, keys, CHUNK: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr
):
    """Of each sequence, the number of leading pages to share: a program a sequence.

    Args:
        tables: block ids int32 [count, row_stride].
        lengths: tokens of each sequence, int32 [count]; the last one is the token that is being decoded.
        min_pages: fewer shared pages than that are not worth an entry.
        keys: to write, int32 [count]: the same number for all that share the same pages; −1: none.
        STEPS: bits of the largest number of pages.
        N: a power of two, ``count`` at least.
    """
    mine = tl.program_id(0)
    others = tl.arange(0, N)
    exists = others < count
    # the page of the token that is being decoded is written in this step, and nobody else's
    full = tl.maximum(tl.load(lengths + mine) - 1, 0) // page
    fulls = tl.maximum(tl.load(lengths + others, mask=exists, other=0) - 1, 0) // page
    mine_row = tables + mine.to(tl.int64) * row_stride
    rows = tables + others.to(tl.int64) * row_stride

    # Common pages with each other sequence, by bisection: equal block ids at a depth mean an equal prefix, but for
    # prompts that were computed twice. fill_batch compares what is chosen here, page by page.
    common = tl.zeros([N], dtype=tl.int32)
    highest = tl.minimum(full, fulls)
    for _ in range(STEPS):
        middle = (common + highest + 1) // 2
        open_ = common < highest
        block = tl.load(mine_row + middle - 1, mask=open_, other=0)
        theirs = tl.load(rows + middle - 1, mask=open_ & exists, other=-1)
        same = open_ & (block == theirs) & (block != 0)  # block 0 is vLLM's padding
        highest = tl.where(open_ & (block != theirs) | (open_ & (block == 0)), middle - 1, highest)
        common = tl.where(same, middle, common)

    # Of pages that m sequences read together each of them saves (m − 1)/m.
    depths = tl.sort(common)  # the sequences from here on share this much: N − position of them
    sharers = tl.minimum(N - others, CHUNK).to(tl.float32)
    saved = tl.where(depths >= min_pages, depths.to(tl.float32) * (sharers - 1.0) / sharers, 0.0)
    most = tl.max(saved, axis=0)
    depth = tl.max(tl.where((saved == most) & (saved > 0.0), depths, 0), axis=0)
    leader = tl.min(tl.where(exists & (common >= depth), others, N), axis=0)
    tl.store(keys + mine, tl.where(depth > 0, leader * _KEY + depth, -1))


@triton.jit(do_not_specialize=["count"])
def form_chunks(keys, count, heads, places, sizes, CHUNK: tl.constexpr, N: tl.constexpr):
    """Cut those of one key into chunks, in the order of the batch: a program a sequence.

    Args:
        keys: as of ``choose_prefixes``.
        heads: to write, int32 [count]: the first sequence of its chunk; −1: it is in none.
        places: to write, int32 [count]: its place in the chunk.
        sizes: to write, int32 [count]: sequences of its chunk.
    """
    mine = tl.program_id(0)
    others = tl.arange(0, N)
    key = tl.load(keys + mine)
    alike = (tl.load(keys + others, mask=others < count, other=-1) == key) & (key >= 0)
    rank = tl.sum((alike & (others < mine)).to(tl.int32), axis=0)
    first = rank // CHUNK * CHUNK
    size = tl.minimum(tl.sum(alike.to(tl.int32), axis=0) - first, CHUNK)
    order = tl.cumsum(alike.to(tl.int32), axis=0) - 1
    head = tl.sum(tl.where(alike & (order == first), others, 0), axis=0)
    tl.store(heads + mine, tl.where(size >= 2, head, -1))
    tl.store(places + mine, rank - first)
    tl.store(sizes + mine, size)


@triton.jit
def _fill_shared(
    entry, tables, row_stride, page, keys, leads, their_sizes, starts, entry_lengths, target, reads,
    COPY: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    others = tl.arange(0, N)
    order = tl.cumsum(leads.to(tl.int32), axis=0) - 1
    is_this = leads & (order == entry)
    head = tl.sum(tl.where(is_this, others, 0), axis=0)
    used = tl.sum(is_this.to(tl.int32), axis=0) > 0
    depth = tl.where(used, tl.load(keys + head) % _KEY, 0)
    tl.store(starts + entry + 1, tl.sum(tl.where(order <= entry, their_sizes, 0), axis=0))
    tl.store(entry_lengths + entry, depth * page)
    tl.atomic_add(reads + 1, -(depth * page).to(tl.int64), sem="relaxed")
    source, at = tables + head.to(tl.int64) * row_stride, tl.arange(0, COPY)
    for done in range(0, depth, COPY):
        inside = done + at < depth
        tl.store(target + done + at, tl.load(source + done + at, mask=inside, other=0), mask=inside)


@triton.jit
def _has_pages(source, shared, depth, COPY: tl.constexpr):
    at = tl.arange(0, COPY)
    unlike = tl.zeros([COPY], dtype=tl.int32)
    for done in range(0, depth, COPY):
        inside = done + at < depth
        block = tl.load(source + done + at, mask=inside, other=0)
        theirs = tl.load(shared + done + at, mask=inside, other=0)
        unlike += (inside & ((block != theirs) | (block == 0))).to(tl.int32)
    return tl.sum(unlike, axis=0) == 0


@triton.jit
def _fill_own(
    mine, tables, row_stride, lengths, count, page, keys, heads, places, their_sizes,
    start, entry_length, target, shared_rows, own_rows, reads,
    COPY: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    others = tl.arange(0, N)
    head = tl.load(heads + mine)
    length = tl.load(lengths + mine)
    source = tables + mine.to(tl.int64) * row_stride
    depth = tl.where(head >= 0, tl.load(keys + mine) % _KEY, 0)
    # one that does not have all of the pages after all reads its own, and its shared row's result is left alone
    shared = tables + tl.maximum(head, 0).to(tl.int64) * row_stride
    depth = tl.where(_has_pages(source, shared, depth, COPY), depth, 0)
    before = tl.sum(tl.where(others < head, their_sizes, 0), axis=0)
    tl.store(shared_rows + mine, tl.where(depth > 0, before + tl.load(places + mine), -1))
    decodes = tl.load(lengths + others, mask=others < count, other=0) > 0
    row = tl.sum(their_sizes, axis=0) + tl.sum((decodes & (others < mine)).to(tl.int32), axis=0)
    tl.store(own_rows + mine, tl.where(length > 0, row, -1))
    tl.store(start, tl.where(length > 0, row + 1, row))
    tl.store(entry_length, length - depth * page)
    tl.atomic_add(reads, length.to(tl.int64), sem="relaxed")
    tl.atomic_add(reads + 1, (depth * page).to(tl.int64), sem="relaxed")
    pages = (length + page - 1) // page - depth
    at = tl.arange(0, COPY)
    for done in range(0, pages, COPY):
        inside = done + at < pages
        tl.store(target + done + at, tl.load(source + depth + done + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def fill_batch(
    tables, row_stride, lengths, count, page, keys, heads, places, sizes,
    starts, entry_lengths, entry_tables, entry_stride, shared_rows, own_rows, reads,
    COPY: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the batch's entries: ``count // 2`` programs for shared ones, then one for each sequence's own.

    Args:
        heads, places, sizes: as of ``form_chunks``.
        starts: to write, int32 [entries + 1]: where each entry's rows begin.
        entry_lengths: to write, int32 [entries]: tokens of KV that they attend to.
        entry_tables: to write, int32 [entries, entry_stride]: block ids of these tokens; the rest of a row stays.
        shared_rows, own_rows: to write, int32 [count]: a sequence's two rows; −1: it has none.
        reads: to add to, int64 [2]: the tokens of all sequences, and those that their entries have fewer.
    """
    entry = tl.program_id(0)
    others = tl.arange(0, N)
    leads = tl.load(heads + others, mask=others < count, other=-1) == others
    their_sizes = tl.where(leads, tl.load(sizes + others, mask=others < count, other=0), 0)
    target = entry_tables + entry.to(tl.int64) * entry_stride
    if entry == 0:
        tl.store(starts, 0)
    if entry < count // 2:
        _fill_shared(
            entry, tables, row_stride, page, keys, leads, their_sizes, starts, entry_lengths, target, reads, COPY, N
        )
    else:
        _fill_own(
            entry - count // 2, tables, row_stride, lengths, count, page, keys, heads, places, their_sizes,
            starts + entry + 1, entry_lengths + entry, target, shared_rows, own_rows, reads, COPY, N,
        )  # fmt: skip


@dataclass(frozen=True)
class Entries:
    """Rows of queries that attend to the same tokens, and these tokens' pages."""

    starts: torch.Tensor
    """int32 [entries + 1]: the rows of entry ``e`` are those from ``starts[e]`` up to ``starts[e + 1]``."""
    lengths: torch.Tensor
    """int32 [entries]: tokens of KV that all rows of an entry attend to; 0: it has no rows, or nothing to attend to."""
    tables: torch.Tensor
    """Block ids int32 [entries, pages]."""
    max_rows: int
    """Of one entry."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Grouped(Entries):
    """A decode batch of ``n`` sequences: its shared entries, then an own one of each; views of a ``Grouping``'s
    buffers."""

    shared_rows: torch.Tensor
    """int32 [n]: the row of each sequence's query among the shared entries; −1: it shares nothing."""
    own_rows: torch.Tensor
    """int32 [n]: the row among the own entries; −1: the sequence is padding."""

    @property
    def sequences(self) -> int:
        """Of the batch, padding included."""
        return len(self.own_rows)

    @cached_property
    def shared(self) -> Entries:
        """The shared entries alone, whose rows are at most ``sequences``."""
        count = len(self) - self.sequences
        return Entries(self.starts[: count + 1], self.lengths[:count], self.tables[:count], self.max_rows)

    @property
    def own_lengths(self) -> torch.Tensor:
        """int32 [n]: tokens of each sequence's own entry, in the batch's order."""
        return self.lengths[len(self) - self.sequences :]

    @property
    def own_tables(self) -> torch.Tensor:
        """Block ids int32 [n, pages] of these tokens."""
        return self.tables[len(self) - self.sequences :]

    @property
    def rows(self) -> int:
        """Of all entries at most: what buffers for queries and results need."""
        return 2 * self.sequences


class Grouping:
    """Buffers for the entries of batches, and the kernels that fill them."""

    def __init__(
        self, max_sequences: int, max_pages: int, page_tokens: int, chunk: int, min_pages: int, device: torch.device
    ) -> None:
        """``max_pages``: of a sequence; ``chunk``: sequences of one shared entry; ``min_pages``: of a shared entry.

        Raises ValueError for sizes that do not fit into a key, and for a chunk of less than two.
        """
        if max_sequences > MAX_SEQUENCES or max_pages > MAX_PAGES:
            raise ValueError(
                f"a batch of {max_sequences} sequences of {max_pages} pages: groups are found among at most "
                f"{MAX_SEQUENCES} sequences of {MAX_PAGES} pages"
            )
        if chunk < 2 or min_pages < 1:
            raise ValueError(f"chunks of {chunk} sequences with {min_pages} pages in common: 2 and 1 are the least")
        self.last: Grouped | None = None
        """What the last batch became."""
        self.reads = KVReads(device)
        """Of all batches."""
        self._page_tokens, self._chunk, self._min_pages = page_tokens, chunk, min_pages
        self._steps = max_pages.bit_length()
        self._width = triton.next_power_of_2(max_sequences)  # the same for every batch: the kernels are compiled once
        self._choose = RepeatedLaunch(choose_prefixes, num_warps=max(4, self._width // 64))
        self._form, self._fill = RepeatedLaunch(form_chunks, num_warps=4), RepeatedLaunch(fill_batch, num_warps=4)
        self._views: dict[int, Grouped] = {}
        """By sequences: making these views would take as long as launching a kernel."""
        entries = max_sequences // 2 + max_sequences

        def buffer(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._starts, self._lengths = buffer(entries + 1), buffer(entries)
        self._tables = buffer(entries, max_pages)
        self._keys, self._heads, self._places, self._sizes, self._shared_rows, self._own_rows = (
            buffer(max_sequences) for _ in range(6)
        )

    def group(self, tables: torch.Tensor, lengths: torch.Tensor) -> Grouped:
        """Queue the kernels that write the batch's entries over those of the batch before.

        Args:
            tables: block ids int32 [sequences, pages].
            lengths: tokens of each sequence, int32 [sequences], with the one that is being decoded; 0: padding.

        Raises ValueError for a batch that is larger than the buffers.
        """
        count, pages = tables.shape
        if count > len(self._keys) or pages > self._tables.shape[1]:
            raise ValueError(
                f"{count} sequences of {pages} pages, and there are buffers for {len(self._keys)} of "
                f"{self._tables.shape[1]}"
            )
        given = (tables, tables.stride(0), lengths, count, self._page_tokens)
        # all other arguments are the same each time, or numbers that Triton does not look at
        alike = (tables.dtype, tables.data_ptr() % 16, tables.stride(0), lengths.dtype, lengths.data_ptr() % 16)
        self._choose(count, alike, *given, self._min_pages, self._keys, self._chunk, self._steps, self._width)
        self._form(count, None, self._keys, count, self._heads, self._places, self._sizes, self._chunk, self._width)
        self.last = self._batch_of(count)
        self._fill(
            len(self.last), alike, *given, self._keys, self._heads, self._places, self._sizes,
            self._starts, self._lengths, self._tables, self._tables.stride(0), self._shared_rows, self._own_rows,
            self.reads.counts, _COPY, self._width,
        )  # fmt: skip
        return self.last

    def _batch_of(self, count: int) -> Grouped:
        if (known := self._views.get(count)) is None:
            entries = count // 2 + count
            known = self._views[count] = Grouped(
                self._starts[: entries + 1],
                self._lengths[:entries],
                self._tables[:entries],
                self._chunk,
                self._shared_rows[:count],
                self._own_rows[:count],
            )
        return known
