"""Decode attention over a grouped batch: copy queries to rows, attend each entry's tokens, merge the partial
results."""

from dataclasses import dataclass
from typing import Protocol

import torch

from rollout_service.engine.attention.fp8_decode import Before, Variant, decode
from rollout_service.engine.attention.grouping import Entries, Grouped
from rollout_service.engine.attention.merging import merge, spread


class Attend(Protocol):
    """Attention of query rows over the paged keys and values of their entries."""

    def __call__(self, rows: torch.Tensor, batch: Entries, output: torch.Tensor) -> torch.Tensor:
        """Write ``output`` [rows, heads, size] and return each row's LSE, fp32 [heads, rows].

        Each row of ``rows`` [rows, heads, size] that belongs to an entry attends to all tokens of the entry. There is
        no causal mask, because all these tokens precede the row. The results of rows without an entry are undefined.
        """
        ...


def grouped_decode(query: torch.Tensor, batch: Grouped, attend: Attend, output: torch.Tensor) -> None:
    """Write ``output`` [sequences, heads, size]: the attention of one token of each sequence over all its tokens.

    ``query`` [sequences, heads, size] has the dtype that ``attend`` takes, which may be FP8.
    """
    rows = query.new_empty(batch.rows, *query.shape[1:])
    spread(query, rows, batch.shared_rows, batch.own_rows)
    partial = output.new_empty(batch.rows, *output.shape[1:])
    lse = attend(rows, batch, partial)
    merge(partial, lse, batch.shared_rows, batch.own_rows, output)


@dataclass(frozen=True)
class FP8Cache:
    """The KV cache of one layer with its scales, for the decode kernel of ``fp8_decode.py``."""

    keys: torch.Tensor
    """Keys in FP8 [pages, tokens per page, KV heads, size]."""
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Scales of q, k and v codes, one fp32 element each."""
    softmax_scale: float
    variant: Variant


def grouped_fp8_decode(
    query: torch.Tensor, batch: Grouped, attend: Attend, cache: FP8Cache, output: torch.Tensor
) -> None:
    """Compute ``grouped_decode`` with ``attend`` for the shared entries only.

    The decode kernel reads each sequence's private tokens. Its tiles have fewer rows than FlashAttention's, and it
    continues from the result over the shared tokens. ``query`` is FP8.
    """
    shape = (batch.sequences, *query.shape[1:])
    rows, partial = query.new_empty(shape), output.new_empty(shape)
    spread(query, rows, batch.shared_rows)
    before = Before(batch.shared_rows, partial, attend(rows, batch.shared, partial))
    decode(
        query, cache.keys, cache.values, batch.own_tables, batch.own_lengths, cache.scales, cache.softmax_scale,
        output, before=before, variant=cache.variant,
    )  # fmt: skip
