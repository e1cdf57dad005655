"""The log-ratios that every weight, rejection and statistic is made of, and how they are joined per sequence."""

from dataclasses import dataclass

import torch

from rollout_service.correction.batch import Rows, as_batch

LOG_RATIO_BOUND = 20.0
"""Logs are clamped to ±20 before ``exp``, as in verl's rollout correction: one token must not overflow a mean."""


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Trainer against rollout over the sampled tokens of a batch. Detached, fp64, zero where nothing was sampled."""

    trainer: torch.Tensor
    """Natural logs [batch, tokens]."""
    rollout: torch.Tensor
    """Natural logs [batch, tokens]."""
    log_ratio: torch.Tensor
    """``trainer − rollout`` [batch, tokens], not clamped."""
    selected: torch.Tensor
    """Which positions are sampled tokens, bool [batch, tokens]."""
    dtype: torch.dtype
    """What weights are returned in: fp32, or fp64 if a logprob was."""

    @property
    def rows(self) -> torch.Tensor:
        """Which sequences have a token, bool [batch]. The others are in no mean."""
        return self.selected.any(-1)

    @property
    def bounded(self) -> torch.Tensor:
        """``log_ratio`` within ±20 [batch, tokens]."""
        return bounded(self.log_ratio)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each sequence's tokens, [batch, tokens], 0 where masked → [batch]; 0 for one without any."""
        return values.sum(-1) / self.selected.sum(-1).clamp(min=1)

    def sequence_max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest of each sequence's values ≥ 0, [batch, tokens], 0 where masked → [batch]; 0 for one without any."""
        return values.amax(-1)

    def over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """A value per sequence for each of its tokens, [batch] → [batch, tokens]."""
        return values[:, None].expand_as(self.selected)


def compare(trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None) -> LogRatios:
    """Log-ratios of a batch, padded or ragged. Raises ValueError for what ``as_batch`` refuses."""
    trainer, rollout, selected = as_batch(trainer_logprobs, rollout_logprobs, mask)
    widest = torch.promote_types(trainer.dtype, rollout.dtype)
    # fp64: the k3 of a token that hardly moved is far below what fp32 resolves beside 1.
    trainer = trainer.detach().double().where(selected, 0.0)
    rollout = rollout.detach().double().where(selected, 0.0)
    return LogRatios(trainer, rollout, trainer - rollout, selected, torch.promote_types(widest, torch.float32))


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(lr) − 1 − lr`` of each, any shape, within ±20 (Schulman, "Approximating KL Divergence", 2020)."""
    safe = bounded(log_ratio)
    return torch.expm1(safe) - safe  # exp(lr) − 1 alone loses every digit of a small ratio


def chi2(log_ratio: torch.Tensor) -> torch.Tensor:
    """``ρ² − 1`` of each, any shape, ``lr`` within ±20 (verl)."""
    return torch.expm1(2.0 * bounded(log_ratio))


def mult_prob_error(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp |lr|`` of each, any shape, within ±20 (NeMo-RL)."""
    return bounded(log_ratio.abs()).exp()


def bounded(log: torch.Tensor) -> torch.Tensor:
    """``log`` clamped to ±20, safe to exponentiate; any shape."""
    return log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
