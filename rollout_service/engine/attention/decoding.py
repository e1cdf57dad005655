"""Decode attention over a grouped batch: queries to their rows, one attention call, parts merged."""

from typing import Protocol

import torch

from rollout_service.engine.attention.grouping import Grouped
from rollout_service.engine.attention.merging import merge, spread


class Attend(Protocol):
    """Attention of query rows to the paged keys and values of their entries."""

    def __call__(self, rows: torch.Tensor, batch: Grouped, output: torch.Tensor) -> torch.Tensor:
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
