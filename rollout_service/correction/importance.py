"""Importance weights of sampled tokens: pi_trainer / pi_rollout, bounded."""

import math

import torch

from rollout_service.correction.log_ratio import LOG_RATIO_BOUND, masked_log_ratio


def truncated_importance_weights(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, *, cap: float = 2.0
) -> torch.Tensor:
    """Token-level truncated importance sampling: ``min(exp(trainer − rollout), cap)`` [batch, tokens], 0 where masked.

    Multiply the policy loss of each token by its weight. ``trainer_logprobs`` are the trainer's own, of the tokens
    that were sampled, before the optimizer step; ``rollout_logprobs`` are the ones returned with them. All are
    natural logs [batch, tokens]; ``mask`` is bool or 0/1, and what masked positions hold has no influence.
    The weights carry no gradient, are fp32 (fp64 for fp64 logprobs) and lie in [0, cap].

    Formula: verl rollout correction (token level, ``lr`` clamped to ±20); proposed as TIS with FlashRL (Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).

    Raises ValueError for what ``masked_log_ratio`` refuses, and for a cap that is not a positive number.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"cap={cap} must be a positive number: weights are truncated there (verl's default is 2.0)")
    log_ratio, selected = masked_log_ratio(trainer_logprobs, rollout_logprobs, mask)
    weights = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
    return weights * selected
