"""Group the sequences of a decode batch by shared KV cache pages, on the GPU and from block tables alone.

Completions of one prompt share the prompt's pages, because the prefix cache gives them the same block ids. A batch of
``n`` sequences becomes at most ``n // 2 + n`` entries. First come the *shared* entries: the pages common to up to
``chunk`` sequences, with one query row per sequence. Then comes each sequence's *own* entry: its other pages, with one
row. Nothing here waits for the GPU or depends on values on the host. All outputs are in buffers with fixed addresses,
so that CUDA graphs can read them.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

MAX_PAGES = (1 << 20) - 1
MAX_SEQUENCES = 1 << 10
_KEY = tl.constexpr(MAX_PAGES + 1)
"""Factor of an int32 key: the index of the first sequence with the shared pages, times this, plus the number of
pages."""
_COPY = 512
"""Block ids that a program copies per iteration."""


@triton.jit(do_not_specialize=["count"])
def choose_prefixes(
    tables, row_stride, lengths, count, page, min_pages, keys, CHUNK: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr
):
    """Choose the number of leading pages that each sequence shares. One program per sequence.

    Args:
        tables: block ids, int32 [count, row_stride].
        lengths: tokens per sequence, int32 [count]; the last one is being decoded.
        min_pages: minimum number of pages of a shared entry.
        keys: output, int32 [count]. Sequences with the same shared pages have the same key; −1 means none.
        STEPS: number of bits of the largest page count.
        N: a power of two, at least ``count``.
    """
    mine = tl.program_id(0)
    others = tl.arange(0, N)
    exists = others < count
    # this step writes the page of the decoded token, so that page is never shared
    full = tl.maximum(tl.load(lengths + mine) - 1, 0) // page
    fulls = tl.maximum(tl.load(lengths + others, mask=exists, other=0) - 1, 0) // page
    mine_row = tables + mine.to(tl.int64) * row_stride
    rows = tables + others.to(tl.int64) * row_stride

    # Find the common pages with each other sequence by bisection. Equal block ids at a depth mean an equal prefix,
    # except for prompts that were computed twice. fill_batch therefore compares the chosen pages one by one.
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

    # each of m sequences that read pages together saves (m − 1)/m of them
    depths = tl.sort(common)  # the N − position sequences from here on share at least this many pages
    sharers = tl.minimum(N - others, CHUNK).to(tl.float32)
    saved = tl.where(depths >= min_pages, depths.to(tl.float32) * (sharers - 1.0) / sharers, 0.0)
    most = tl.max(saved, axis=0)
    depth = tl.max(tl.where((saved == most) & (saved > 0.0), depths, 0), axis=0)
    leader = tl.min(tl.where(exists & (common >= depth), others, N), axis=0)
    tl.store(keys + mine, tl.where(depth > 0, leader * _KEY + depth, -1))


@triton.jit(do_not_specialize=["count"])
def form_chunks(keys, count, heads, places, sizes, CHUNK: tl.constexpr, N: tl.constexpr):
    """Cut the sequences with one key into chunks, in batch order. One program per sequence.

    Args:
        keys: the output of ``choose_prefixes``.
        heads: output, int32 [count]: the first sequence of the chunk; −1 for no chunk.
        places: output, int32 [count]: the position in the chunk.
        sizes: output, int32 [count]: the number of sequences in the chunk.
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
    # a sequence without all of the shared pages reads its own; the result of its shared row is ignored
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
    """Write the batch's entries: ``count // 2`` programs for shared entries, then one for each own entry.

    Args:
        heads, places, sizes: the output of ``form_chunks``.
        starts: output, int32 [entries + 1]: the first row of each entry.
        entry_lengths: output, int32 [entries]: KV tokens of each entry.
        entry_tables: output, int32 [entries, entry_stride]: block ids of these tokens. The rest of a row is unchanged.
        shared_rows, own_rows: output, int32 [count]: the two rows of a sequence; −1 for none.
        reads: int64 [2], incremented by the tokens of all sequences, and by the tokens saved by grouping.
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
    """Query rows that attend to the same tokens, with the pages of these tokens."""

    starts: torch.Tensor
    """int32 [entries + 1]: entry ``e`` has the rows from ``starts[e]`` up to ``starts[e + 1]``."""
    lengths: torch.Tensor
    """int32 [entries]: KV tokens that all rows of an entry attend to; 0 if it has no rows or no tokens."""
    tables: torch.Tensor
    """Block ids, int32 [entries, pages]."""
    max_rows: int
    """Maximum number of rows per entry."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Grouped(Entries):
    """A decode batch of ``n`` sequences: its shared entries, then one own entry per sequence. The tensors are views of
    a ``Grouping``'s buffers."""

    shared_rows: torch.Tensor
    """int32 [n]: the row of each sequence's query among the shared entries; −1 if it shares nothing."""
    own_rows: torch.Tensor
    """int32 [n]: the row among the own entries; −1 for padding."""

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch, including padding."""
        return len(self.own_rows)

    @cached_property
    def shared(self) -> Entries:
        """The shared entries only. They have at most ``sequences`` rows."""
        count = len(self) - self.sequences
        return Entries(self.starts[: count + 1], self.lengths[:count], self.tables[:count], self.max_rows)

    @property
    def own_lengths(self) -> torch.Tensor:
        """int32 [n]: tokens of each sequence's own entry, in batch order."""
        return self.lengths[len(self) - self.sequences :]

    @property
    def own_tables(self) -> torch.Tensor:
        """Block ids of these tokens, int32 [n, pages]."""
        return self.tables[len(self) - self.sequences :]

    @property
    def rows(self) -> int:
        """Maximum number of rows of all entries: the size of buffers for queries and results."""
        return 2 * self.sequences


class RepeatedLaunch:
    """Launches of one kernel, with its compiled variants cached under the caller's keys.

    For each launch, Triton inspects all arguments to find the compiled variant: dtypes, address alignment, multiples of
    16, constants. With a dozen arguments that takes more than half of the launch time.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel, self._num_warps = kernel, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, programs: int, key: Hashable, *arguments: Any) -> None:
        """Queue ``programs`` programs.

        Args:
            key: equal only for arguments that Triton compiles alike.
            arguments: all arguments of the kernel in signature order, including constants.
        """
        if (compiled := self._compiled.get(key)) is not None:
            compiled[(programs, 1, 1)](*arguments)
            return
        compiled = self._kernel[(programs,)](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled


class KVReads:
    """The KV cache tokens that decode steps attend to, and those that grouping saves, counted in GPU memory.

    A reader gets the copy that the previous read queued, so that it never waits for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: torch.Tensor | None = None
        self._copy = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._last = (0, 0)

    @property
    def counts(self) -> torch.Tensor:
        """int64 [2] on the device: tokens attended to, and tokens saved by grouping; for one layer.

        Allocated with the first grouped batch. Memory allocated earlier belongs to the KV cache and is freed while the
        engine sleeps.
        """
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        return self._counts

    def read(self) -> tuple[int, int]:
        """Return ``counts`` as of the previous call; zeros at the first call."""
        if self._copied is not None and not self._copied.query():
            return self._last  # the GPU has not reached the copy yet
        attended, spared = self._copy.tolist()
        self._last = (attended, spared)
        if self._counts is not None:
            # vLLM may have created both in inference mode, and torch forbids the copy outside of it
            with torch.inference_mode():
                self._copy.copy_(self._counts, non_blocking=True)
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        return self._last


class Grouping:
    """Buffers for the entries of batches, and the kernels that fill them."""

    def __init__(
        self, max_sequences: int, max_pages: int, page_tokens: int, chunk: int, min_pages: int, device: torch.device
    ) -> None:
        """Allocate the buffers. Raises ValueError for sizes that do not fit into a key, and for a chunk of less than
        two.

        Args:
            max_sequences: maximum number of sequences in a batch.
            max_pages: maximum number of pages per sequence.
            page_tokens: tokens per page.
            chunk: maximum number of sequences per shared entry.
            min_pages: minimum number of pages of a shared entry.
            device: the GPU.
        """
        if max_sequences > MAX_SEQUENCES or max_pages > MAX_PAGES:
            raise ValueError(
                f"a batch of {max_sequences} sequences of {max_pages} pages: groups are found among at most "
                f"{MAX_SEQUENCES} sequences of {MAX_PAGES} pages"
            )
        if chunk < 2 or min_pages < 1:
            raise ValueError(f"chunks of {chunk} sequences with {min_pages} pages in common: 2 and 1 are the least")
        self.last: Grouped | None = None
        """The last batch."""
        self.reads = KVReads(device)
        """Counts the reads of all batches."""
        self._page_tokens, self._chunk, self._min_pages = page_tokens, chunk, min_pages
        self._steps = max_pages.bit_length()
        # the same for every batch, so that the kernels are compiled once
        self._width = triton.next_power_of_2(max_sequences)
        self._choose = RepeatedLaunch(choose_prefixes, num_warps=max(4, self._width // 64))
        self._form, self._fill = RepeatedLaunch(form_chunks, num_warps=4), RepeatedLaunch(fill_batch, num_warps=4)
        self._views: dict[int, Grouped] = {}
        """Views by number of sequences. Creating them takes as long as launching a kernel."""
        entries = max_sequences // 2 + max_sequences

        def buffer(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._starts, self._lengths = buffer(entries + 1), buffer(entries)
        self._tables = buffer(entries, max_pages)
        self._keys, self._heads, self._places, self._sizes, self._shared_rows, self._own_rows = (
            buffer(max_sequences) for _ in range(6)
        )

    def group(self, tables: torch.Tensor, lengths: torch.Tensor) -> Grouped:
        """Queue the kernels that write the batch's entries over those of the previous batch.

        Raises ValueError for a batch larger than the buffers.

        Args:
            tables: block ids, int32 [sequences, pages].
            lengths: tokens per sequence including the decoded one, int32 [sequences]; 0 is padding.
        """
        count, pages = tables.shape
        if count > len(self._keys) or pages > self._tables.shape[1]:
            raise ValueError(
                f"{count} sequences of {pages} pages, and there are buffers for {len(self._keys)} of "
                f"{self._tables.shape[1]}"
            )
        given = (tables, tables.stride(0), lengths, count, self._page_tokens)
        # all other arguments are constant, or numbers that do not affect Triton's specialization
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
