"""Importance weights π_trainer / π_rollout, truncated (TIS) or masked (IcePop)."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.batch import Rows
from rollout_service.correction.bounds import require_bounds, require_choice
from rollout_service.correction.ratios import LOG_RATIO_BOUND, LogRatios, bounded, compare

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Outside: TypeAlias = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Parameters of importance weights: the ratio's level, its bounds, and the treatment of ratios outside them.

    Formulas: verl's rollout correction for ``token`` and ``sequence``, slime's MIS for ``geometric``. Truncation is TIS
    (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), masking is IcePop
    (Ring-1T report, 2025). Raises ValueError for bounds that are not positive or in the wrong order.
    """

    level: Level = "token"
    """``token``: exp(lr_t). ``sequence``: exp(Σ lr_t), one weight for all tokens of a sequence; unbiased, with a large
    variance. ``geometric``: exp(mean lr_t), also one for all. ``lr = trainer − rollout``; the exponent is clamped to
    ±20."""

    upper: float = 2.0
    """The cap C. ``math.inf``: none but e²⁰."""

    lower: float | None = None
    """None: no lower bound. Otherwise in (0, upper]."""

    outside: Outside = "truncate"
    """Weights beyond the bounds: ``truncate`` moves them to the bound; ``mask`` makes them 0. Such a token stays in the
    mask and so in the loss's denominator: to remove it from that, too, use a ``Rejection``."""

    batch_normalize: bool = False
    """Divide by the batch's mean weight (over tokens; over sequences unless ``level`` is ``token``), so that the mean
    is 1. The batch is the input of one call: not a larger batch that was split, and not other ranks' share."""

    def __post_init__(self) -> None:
        require_choice("ImportanceWeights", "level", self.level, get_args(Level))
        require_choice("ImportanceWeights", "outside", self.outside, get_args(Outside))
        require_bounds("ImportanceWeights", self.lower, self.upper)

    @property
    def reported_lower(self) -> float:
        """Return the limit for ``…_fraction_low``: ``lower``, or as in verl 1/``upper`` without one."""
        return 1.0 / self.upper if self.lower is None else self.lower

    def ratios(self, ratios: LogRatios) -> torch.Tensor:
        """Return exp of the level's log-ratio, clamped to ±20: fp64 [batch, tokens], 0 where masked."""
        if self.level == "token":
            log = ratios.log_ratio
        elif self.level == "sequence":
            log = ratios.over_tokens(ratios.log_ratio.sum(-1))
        else:
            log = ratios.over_tokens(ratios.sequence_mean(ratios.log_ratio))
        return bounded(log).exp() * ratios.selected

    def bound(self, raw: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Truncate or mask the result of ``ratios``; same shape and dtype."""
        if self.outside == "truncate":
            return raw.clamp(min=self.lower, max=self.upper) * selected
        return raw.where(self.within(raw), 0.0)

    def within(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the mask of weights within the bounds, bool, same shape."""
        inside = raw <= self.upper
        return inside if self.lower is None else inside & (raw >= self.lower)


@dataclass(frozen=True, slots=True)
class GammaWeights:
    """Parameters of VESPO's soft sequence weights, whose advantage's sign selects ``k`` and ``λ`` (arXiv 2602.10693).

    The weight of all tokens of a sequence is ``exp(λ + k ln w − λ w)``, with ``ln w = Σ lr_t`` clamped to [ln 1e-8, 20]
    and each ``lr_t`` to ±20. It is 1 at ``w = 1`` and falls to 0 on both sides. Names and defaults are TRL's
    ``vespo_…``. ``correct`` needs advantages. Raises ValueError for a parameter that is not a positive, finite number.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    """For advantages of at least 0."""
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            require_bounds(f"GammaWeights {name}", getattr(self, name), None)

    def weights(self, ratios: LogRatios) -> torch.Tensor:
        """Return the weights, fp64 [batch, tokens], 0 where masked."""
        log = ratios.over_tokens(ratios.bounded.sum(-1)).clamp(math.log(1e-8), LOG_RATIO_BOUND)
        negative = ratios.required_advantages < 0
        k = torch.full_like(log, self.k_pos).masked_fill(negative, self.k_neg)
        scale = torch.full_like(log, self.lambda_pos).masked_fill(negative, self.lambda_neg)
        return (scale + k * log - scale * log.exp()).exp() * ratios.selected


def truncated_importance_weights(
    trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None = None, *, cap: float = 2.0
) -> torch.Tensor:
    """Compute token-level truncated importance sampling weights: ``min(exp(trainer − rollout), cap)``.

    Return [batch, tokens], 0 where masked, without gradient, fp32 (fp64 for fp64 logprobs), within [0, cap]. Multiply
    the policy loss of each token by its weight. ``trainer_logprobs`` are the trainer's own, of the sampled tokens,
    before the optimizer step; ``rollout_logprobs`` were returned with these tokens. Both are natural logs, [batch,
    tokens] or ragged. ``correct`` does the same with metrics, and other recipes.

    Raises the ValueErrors of ``as_batch``, and ValueError for a cap that is not a positive number.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"cap={cap} must be a positive number: weights are truncated there (verl's default is 2.0)")
    ratios = compare(trainer_logprobs, rollout_logprobs, mask)
    recipe = ImportanceWeights(level="token", upper=cap)
    return recipe.bound(recipe.ratios(ratios), ratios.selected).to(ratios.dtype)
