"""Log-ratios, from which every weight, rejection and statistic is computed, and their reduction per sequence."""

from dataclasses import dataclass

import torch

from rollout_service.correction.batch import Advantages, MissingLogprobs, Rows, as_advantages, as_batch

LOG_RATIO_BOUND = 20.0
"""Clamp of logs before ``exp``, as in verl's rollout correction: one token must not overflow a mean."""


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Trainer and rollout over the sampled tokens of a batch. Detached, fp64, zero at other positions."""

    trainer: torch.Tensor
    """Natural logs [batch, tokens]."""
    rollout: torch.Tensor
    """Natural logs [batch, tokens]."""
    log_ratio: torch.Tensor
    """``trainer − rollout`` [batch, tokens], not clamped."""
    selected: torch.Tensor
    """Mask of sampled tokens, bool [batch, tokens]."""
    dtype: torch.dtype
    """Dtype of the returned weights: fp32, or fp64 if a logprob was."""
    missing: float = 0.0
    """The share of sampled tokens whose rollout logprob was not finite."""
    advantages: torch.Tensor | None = None
    """[batch, tokens], if the caller gave them."""

    @property
    def required_advantages(self) -> torch.Tensor:
        """Return the advantages. Raises ValueError if the caller gave none."""
        if self.advantages is None:
            raise ValueError("correct: this recipe depends on the sign of the advantages; give advantages=")
        return self.advantages

    @property
    def rows(self) -> torch.Tensor:
        """Return the mask of sequences with a token, bool [batch]. The others are in no mean."""
        return self.selected.any(-1)

    @property
    def bounded(self) -> torch.Tensor:
        """Return ``log_ratio`` clamped to ±20 [batch, tokens]."""
        return bounded(self.log_ratio)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sequence's tokens, [batch, tokens], 0 where masked → [batch]; 0 for empty
        sequences."""
        return values.sum(-1) / self.selected.sum(-1).clamp(min=1)

    def sequence_max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of each sequence's values ≥ 0, [batch, tokens], 0 where masked → [batch]; 0 for empty
        sequences."""
        return values.amax(-1)

    def over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Expand a value per sequence to its tokens, [batch] → [batch, tokens]."""
        return values[:, None].expand_as(self.selected)


def compare(
    trainer_logprobs: Rows,
    rollout_logprobs: Rows,
    mask: Rows | None,
    advantages: Advantages | None = None,
    missing_logprobs: MissingLogprobs = "refuse",
) -> LogRatios:
    """Return the log-ratios of a batch, padded or ragged. Raises the ValueErrors of ``as_batch`` and
    ``as_advantages``."""
    trainer, rollout, selected, missing = as_batch(trainer_logprobs, rollout_logprobs, mask, missing_logprobs)
    widest = torch.promote_types(trainer.dtype, rollout.dtype)
    # fp64: the k3 of a token with a tiny ratio is far below what fp32 resolves beside 1
    trainer = trainer.detach().double().where(selected, 0.0)
    rollout = rollout.detach().double().where(selected, 0.0)
    return LogRatios(
        trainer,
        rollout,
        trainer - rollout,
        selected,
        torch.promote_types(widest, torch.float32),
        missing,
        None if advantages is None else as_advantages(advantages, selected),
    )


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp(lr) − 1 − lr``, any shape, with lr clamped to ±20 (Schulman, "Approximating KL Divergence",
    2020)."""
    safe = bounded(log_ratio)
    return torch.expm1(safe) - safe  # exp(lr) − 1 alone loses every digit of a small ratio


def chi2(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``ρ² − 1``, any shape, with ``lr`` clamped to ±20 (verl)."""
    return torch.expm1(2.0 * bounded(log_ratio))


def mult_prob_error(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp |lr|``, any shape, with |lr| clamped to 20 (NeMo-RL)."""
    return bounded(log_ratio.abs()).exp()


def bounded(log: torch.Tensor) -> torch.Tensor:
    """Clamp ``log`` to ±20, safe for exp; any shape."""
    return log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
