"""How far the engine that samples is from the policy that is trained, over the sampled tokens."""

from dataclasses import dataclass

import torch

from rollout_service.correction.log_ratio import LOG_RATIO_BOUND, masked_log_ratio


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Estimates of KL(rollout ‖ trainer) in nats per token. Join several by a mean weighted with ``tokens``."""

    k1: float
    """Mean of ``rollout − trainer`` (verl's ``rollout_corr/kl``): unbiased, of either sign."""
    k3: float
    """Mean of ``exp(lr) − 1 − lr`` with ``lr = trainer − rollout`` (verl's ``rollout_corr/k3_kl``): never negative."""
    tokens: int
    """Tokens that the means are over."""


def measure_mismatch(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """k1 and k3 between the trainer's and the engine's logprobs of the sampled tokens, computed in fp64.

    All are natural logs [batch, tokens]; ``mask`` is bool or 0/1, and what masked positions hold has no influence.
    In k3, and only there, ``lr`` is clamped to ±20. The estimators are from Schulman, "Approximating KL Divergence"
    (2020); the names are those of verl's rollout correction.

    Raises ValueError for what ``masked_log_ratio`` refuses.
    """
    log_ratio, selected = masked_log_ratio(trainer_logprobs, rollout_logprobs, mask)
    per_token = log_ratio[selected].double()
    bounded = per_token.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Mismatch(
        k1=-per_token.mean().item(),
        k3=(torch.expm1(bounded) - bounded).mean().item(),
        tokens=per_token.numel(),
    )
