"""What TRL 1.16.0's asynchronous trainer has for CUDA only, so that it also trains on a CPU. It is two things:

- It packs the rollouts of a prompt into a tree and calls ``flash_attn_varlen_func`` of FlashAttention 3
  (trl/experimental/async_grpo/packing.py). Here is the same function in plain PyTorch, as far as ``tree_attention``
  there uses it.
- It asks CUDA for the device's name, to log how much of its peak it uses (trl/trainer/utils.py).
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Attention of each segment of ``query`` [tokens, heads, dim] to its own of ``key`` and ``value``.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` int32 [segments + 1] are where segments begin. The last query of a segment
    stands at its last key, and sees no key after its own; with ``window_size`` (left, 0) none further back than left.
    """
    if not causal or window_size[1] not in (-1, 0):
        raise NotImplementedError(f"causal={causal}, window_size={window_size}: only causal attention is implemented")
    outputs = []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for segment in range(len(starts_q) - 1):
        q = query[starts_q[segment] : starts_q[segment + 1]].transpose(0, 1)
        k, v = (x[starts_k[segment] : starts_k[segment + 1]].transpose(0, 1) for x in (key, value))
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (behind >= 0) if window_size[0] < 0 else (behind >= 0) & (behind <= window_size[0])
        output = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def allow_training_on_a_cpu() -> None:
    """For TRL's trainers of this process. TRL has no setting for either: the names that are replaced are private."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel: Any = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    packing._flash_attn = lambda: kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
