"""Decode attention over a grouped batch: queries to their rows, attention to each entry's tokens, parts merged."""

from dataclasses import dataclass
from typing import Protocol

import torch

from rollout_service.engine.attention.fp8_decode import Before, Variant, decode
from rollout_service.engine.attention.grouping import Entries, Grouped
from rollout_service.engine.attention.merging import merge, spread


class Attend(Protocol):
    """Attention of query rows to the paged keys and values of their entries."""

    def __call__(self, rows: torch.Tensor, batch: Entries, output: torch.Tensor) -> torch.Tensor:
        """Write ``output`` [rows, heads, size] and return each row's LSE, fp32 [heads, rows].

        Every row of ``rows`` [rows, heads, size] that an entry has attends to all tokens of the entry, without a causal
        mask: they all come before it. What rows hold that no entry has is left open, and so are their results.
        """
        ...


def grouped_decode(query: torch.Tensor, batch: Grouped, attend: Attend, output: torch.Tensor) -> None:
    """Write ``output`` [sequences, heads, size]: the attention of one token of each sequence to all of its tokens.

    ``query`` [sequences, heads, size], in the dtype that ``attend`` takes, which may be FP8.
    """
    rows = query.new_empty(batch.rows, *query.shape[1:])
    spread(query, rows, batch.shared_rows, batch.own_rows)
    partial = output.new_empty(batch.rows, *output.shape[1:])
    lse = attend(rows, batch, partial)
    merge(partial, lse, batch.shared_rows, batch.own_rows, output)


@dataclass(frozen=True)
class FP8Cache:
    """One layer's cache and scales, for the decode kernel of ``fp8_decode.py``."""

    keys: torch.Tensor
    """FP8 [pages, tokens of a page, KV heads, size]."""
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """What codes of q, k and v are multiplied by, fp32 with one element each."""
    softmax_scale: float
    variant: Variant


def grouped_fp8_decode(
    query: torch.Tensor, batch: Grouped, attend: Attend, cache: FP8Cache, output: torch.Tensor
) -> None:
    """As ``grouped_decode``, with ``attend`` for shared entries alone.

    Each sequence's own tokens are read by the decode kernel, whose tiles have fewer rows than FlashAttention's, and
    which goes on from the result over the shared ones. ``query`` is FP8.
    """
    shape = (batch.sequences, *query.shape[1:])
    rows, partial = query.new_empty(shape), output.new_empty(shape)
    spread(query, rows, batch.shared_rows)
    before = Before(batch.shared_rows, partial, attend(rows, batch.shared, partial))
    decode(
        query, cache.keys, cache.values, batch.own_tables, batch.own_lengths, cache.scales, cache.softmax_scale,
        output, before=before, variant=cache.variant,
    )  # fmt: skip
