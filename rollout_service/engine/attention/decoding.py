"""Decode attention over a grouped batch: copy queries to rows, attend each entry's tokens, merge the partial
results."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout_service.engine.attention.fp8_decode import Before, Variant, decode
from rollout_service.engine.attention.grouping import Entries, Grouped
from rollout_service.engine.attention.merging import merge, spread

PACKED_ROWS = 64
"""Rows of a tile. FlashAttention packs all query heads of one KV head into it, and one warp group multiplies this many
rows. An entry with more rows would use the larger tile, with padding for all other entries."""
_MAX_PARTIAL_ROWS = 1 << 12


def chunk_sequences(query_heads: int, kv_heads: int) -> int:
    """Return the maximum number of sequences per shared entry: as many as fit the rows of one tile."""
    return PACKED_ROWS * kv_heads // query_heads


def splits(rows: int, most: int) -> int:
    """Return the maximum number of splits of an entry's tokens. ``most``: vLLM's own limit.

    Every CUDA graph holds partial results in fp32 [splits, heads, rows, size]. Larger batches fill the GPU without
    splits, so they get fewer.
    """
    return min(most, max(8, _MAX_PARTIAL_ROWS // rows))


@dataclass(frozen=True)
class FlashAttend:
    """FlashAttention 3 of one layer over vLLM's paged KV cache."""

    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """``flash_attn_varlen_func`` with ``return_softmax_lse``, which returns the result and its LSE."""
    keys: torch.Tensor
    """Keys [pages, tokens per page, KV heads, size]; FP8 if the queries are FP8."""
    values: torch.Tensor
    scale: float
    """Scale of the logits, in addition to the descales."""
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Scales of q, k and v codes, one fp32 element each. Unused in BF16."""
    max_tokens: int
    """Length of the longest sequence in tokens."""
    schedule: torch.Tensor | None
    """The result of vLLM's ``get_scheduler_metadata`` for the same batch. None: the kernel computes it."""
    splits: int

    def __call__(self, rows: torch.Tensor, batch: Entries, output: torch.Tensor) -> torch.Tensor:
        """Write ``output`` [rows, heads, size] and return each row's LSE, fp32 [heads, rows].

        Each row of ``rows`` [rows, heads, size] that belongs to an entry attends to all tokens of the entry. There is
        no causal mask, because all these tokens precede the row. The results of rows without an entry are undefined.
        """
        shape = (len(batch), self.keys.shape[2])
        q_descale, k_descale, v_descale = (descale.expand(shape) for descale in self.descales)
        _, lse = self.kernel(
            q=rows,
            k=self.keys,
            v=self.values,
            out=output,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.max_rows,
            seqused_k=batch.lengths,
            max_seqlen_k=self.max_tokens,
            softmax_scale=self.scale,
            causal=False,
            block_table=batch.tables,
            scheduler_metadata=self.schedule,
            fa_version=3,
            return_softmax_lse=True,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=self.splits,
        )
        return lse


def grouped_decode(query: torch.Tensor, batch: Grouped, attend: FlashAttend, output: torch.Tensor) -> None:
    """Write ``output`` [sequences, heads, size]: the attention of one token of each sequence over all its tokens.

    ``query`` [sequences, heads, size] has the dtype that ``attend`` takes, which may be FP8.
    """
    rows = query.new_empty(batch.rows, *query.shape[1:])
    spread(query, rows, batch.shared_rows, batch.own_rows)
    partial = output.new_empty(batch.rows, *output.shape[1:])
    lse = attend(rows, batch, partial)
    merge(partial, lse, batch.shared_rows, batch.own_rows, output)


def grouped_fp8_decode(
    query: torch.Tensor, batch: Grouped, attend: FlashAttend, variant: Variant, output: torch.Tensor
) -> None:
    """Compute ``grouped_decode`` of an FP8 cache, with ``attend`` for the shared entries only.

    The decode kernel reads each sequence's private tokens. Its tiles have fewer rows than FlashAttention's, and it
    continues from the result over the shared tokens. ``query`` is FP8.
    """
    shape = (batch.sequences, *query.shape[1:])
    rows, partial = query.new_empty(shape), output.new_empty(shape)
    spread(query, rows, batch.shared_rows)
    before = Before(batch.shared_rows, partial, attend(rows, batch.shared, partial))
    decode(
        query, attend.keys, attend.values, batch.own_tables, batch.own_lengths, attend.descales, attend.scale,
        output, before=before, variant=variant,
    )  # fmt: skip
