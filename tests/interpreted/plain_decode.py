"""Plain attention of decoded tokens, which a kernel's results are compared with."""

from collections.abc import Sequence

import torch

from tests.support.shared_pages import paged_attention


def plain_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    descales: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one token of each sequence to its whole table, in fp32. A sequence without tokens gets NaN.

    ``query``: [sequences, heads, size]. ``descales``: one number each for queries, keys and values. Returns the results
    and their LSE [heads, sequences].
    """
    count = len(query)
    out = torch.empty(query.shape, device=query.device)
    q_descale, k_descale, v_descale = (descale.expand(count, keys.shape[2]) for descale in descales)
    _, lse = paged_attention(
        q=query, k=keys, v=values, out=out, cu_seqlens_q=torch.arange(count + 1), max_seqlen_q=1, seqused_k=lengths,
        max_seqlen_k=1 << 20, softmax_scale=scale, causal=False, block_table=tables,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    return out, lse
