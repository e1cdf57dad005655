"""Importance weights π_trainer / π_rollout, truncated (TIS) or masked (IcePop)."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.batch import Rows
from rollout_service.correction.bounds import require_bounds, require_choice
from rollout_service.correction.ratios import LogRatios, bounded, compare

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Outside: TypeAlias = Literal["truncate", "mask"]


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """How tokens are weighted: the ratio's level, its bounds, and what happens outside them.

    Formulas: verl's rollout correction for ``token`` and ``sequence``, slime's MIS for ``geometric``. Truncation is TIS
    (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025), masking is IcePop
    (Ring-1T report, 2025). Raises ValueError for bounds that are not positive or are the wrong way round.
    """

    level: Level = "token"
    """``token``: exp(lr_t). ``sequence``: exp(Σ lr_t), one weight for all tokens of a sequence; unbiased, and of large
    variance. ``geometric``: exp(mean lr_t), also one for all. ``lr = trainer − rollout``, the exponent within ±20."""

    upper: float = 2.0
    """The cap C. ``math.inf``: none but e²⁰."""

    lower: float | None = None
    """None: nothing is too small. Otherwise in (0, upper]."""

    outside: Outside = "truncate"
    """Beyond the bounds: ``truncate`` moves the weight to the bound; ``mask`` makes it 0. Such a token stays in
    the mask and so in the loss's denominator: to take it out of that too, use a ``Rejection``."""

    batch_normalize: bool = False
    """Divide by the batch's mean weight (over tokens; over sequences unless ``level`` is ``token``), so that it is 1.
    The batch is what one call is given: not a micro-batch of it, and not other ranks' share."""

    def __post_init__(self) -> None:
        require_choice("ImportanceWeights", "level", self.level, get_args(Level))
        require_choice("ImportanceWeights", "outside", self.outside, get_args(Outside))
        require_bounds("ImportanceWeights", self.lower, self.upper)

    @property
    def reported_lower(self) -> float:
        """What ``…_fraction_low`` counts below: ``lower``, or as in verl 1/``upper`` where there is none."""
        return 1.0 / self.upper if self.lower is None else self.lower

    def ratios(self, ratios: LogRatios) -> torch.Tensor:
        """exp of the level's log-ratio before any bound but ±20: fp64 [batch, tokens], 0 where masked."""
        if self.level == "token":
            log = ratios.log_ratio
        elif self.level == "sequence":
            log = ratios.over_tokens(ratios.log_ratio.sum(-1))
        else:
            log = ratios.over_tokens(ratios.sequence_mean(ratios.log_ratio))
        return bounded(log).exp() * ratios.selected

    def bound(self, raw: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Truncate or mask what ``ratios`` returned; same shape and dtype."""
        if self.outside == "truncate":
            return raw.clamp(min=self.lower, max=self.upper) * selected
        return raw.where(self.within(raw), 0.0)

    def within(self, raw: torch.Tensor) -> torch.Tensor:
        """Which weights the bounds leave alone, bool, same shape."""
        inside = raw <= self.upper
        return inside if self.lower is None else inside & (raw >= self.lower)


def truncated_importance_weights(
    trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None = None, *, cap: float = 2.0
) -> torch.Tensor:
    """Token-level truncated importance sampling and nothing else: ``min(exp(trainer − rollout), cap)``.

    Returns [batch, tokens], 0 where masked, without gradient, fp32 (fp64 for fp64 logprobs), within [0, cap]. Multiply
    the policy loss of each token by its weight. ``trainer_logprobs`` are the trainer's own, of the tokens that were
    sampled, before the optimizer step; ``rollout_logprobs`` are the ones returned with them: natural logs, [batch,
    tokens] or ragged. ``correct`` does the same with metrics, and other recipes.

    Raises ValueError for what ``as_batch`` refuses, and for a cap that is not a positive number.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"cap={cap} must be a positive number: weights are truncated there (verl's default is 2.0)")
    ratios = compare(trainer_logprobs, rollout_logprobs, mask)
    recipe = ImportanceWeights(level="token", upper=cap)
    return recipe.bound(recipe.ratios(ratios), ratios.selected).to(ratios.dtype)
