"""FlashAttention 3 as what attends: a grouped batch's rows to the pages of vLLM's KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout_service.engine.attention.grouping import Entries

PACKED_ROWS = 64
"""Rows of a tile: FlashAttention packs all query heads of one KV head into it, and one group of warps multiplies up to
so many. More rows of an entry would take the larger tile, whose rows are padding for all other entries."""
_MOST_PARTIAL_ROWS = 1 << 12

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``flash_attn_varlen_func`` with ``return_softmax_lse``: the result and its LSE."""


def chunk_sequences(query_heads: int, kv_heads: int) -> int:
    """Sequences of one shared entry: as many as one tile has rows for."""
    return PACKED_ROWS * kv_heads // query_heads


def splits(rows: int, most: int) -> int:
    """Parts that an entry's tokens may be cut into, which work side by side; ``most``: vLLM's own bound.

    Partial results are fp32 [splits, heads, rows, size] in every CUDA graph, so that there are fewer for larger
    batches, whose entries fill the GPU without.
    """
    return min(most, max(8, _MOST_PARTIAL_ROWS // rows))


@dataclass(frozen=True)
class FlashAttend:
    """One layer's ``Attend``."""

    kernel: Kernel
    keys: torch.Tensor
    """[pages, tokens of a page, KV heads, size]; FP8 if queries are."""
    values: torch.Tensor
    scale: float
    """On logits, beside the descales."""
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """What codes of q, k and v are multiplied by, fp32 with one element each; of no meaning in BF16."""
    max_tokens: int
    """Of the longest sequence."""
    schedule: torch.Tensor | None
    """As vLLM's ``get_scheduler_metadata`` made it for the same batch; None: the kernel makes it."""
    splits: int

    def __call__(self, rows: torch.Tensor, batch: Entries, output: torch.Tensor) -> torch.Tensor:
        """See ``Attend``."""
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
