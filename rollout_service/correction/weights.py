"""Importance weights π_trainer / π_rollout, truncated (TIS) or masked (IcePop), and verl's metrics of them."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.bounds import require_bounds, require_choice, require_positive
from rollout_service.correction.ratios import LOG_RATIO_BOUND, LogRatios, Rows, bounded, compare, share

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
        require_positive("ImportanceWeights", "upper", self.upper)
        require_bounds("ImportanceWeights", self.lower, self.upper)

    def weigh(self, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weights, fp64 [batch, tokens], 0 where masked, and their metrics; names without prefix.

        Metrics are of the weights before batch normalization. Fractions are of tokens, or of sequences if the level is
        not ``token``. ``rollout_is_max`` and ``_min`` are of the bounded weights for tokens and of the ratios for
        sequences, and without ``lower``, ``…_fraction_low`` are the shares below 1/``upper`` (verl).
        """
        raw = self._ratios(ratios)
        weights = self._bound(raw) * ratios.selected
        raw_tokens, tokens = raw[ratios.selected], weights[ratios.selected]
        raw_means, means = (ratios.sequence_mean(values)[ratios.rows] for values in (raw, weights))
        of_tokens = self.level == "token"
        counted, shown = (raw_tokens, tokens) if of_tokens else (raw_means, raw_means)
        lower = 1.0 / self.upper if self.lower is None else self.lower
        metrics = _metrics(tokens) | {
            "rollout_is_max": shown.max().item(),
            "rollout_is_min": shown.min().item(),
            "rollout_is_ratio_fraction_high": share(counted > self.upper),
            "rollout_is_ratio_fraction_low": share(counted < lower),
            "rollout_is_seq_mean": means.mean().item(),
            "rollout_is_seq_std": means.std().item() if means.numel() > 1 else 0.0,
            "rollout_is_seq_max": means.max().item(),
            "rollout_is_seq_min": means.min().item(),
            "rollout_is_seq_max_deviation": (means - 1.0).abs().max().item(),
            "rollout_is_seq_fraction_high": share(raw_means > self.upper),
            "rollout_is_seq_fraction_low": share(raw_means < lower),
        }
        if self.outside == "mask":
            metrics["rollout_is_oob_ratio"] = share(~self._within(raw_tokens))
        if self.batch_normalize:
            mean = (tokens if of_tokens else means).mean().item()
            # weights that are all 0 stay unchanged, as in verl
            factor = metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
            weights = weights / factor
        return weights, metrics

    def _ratios(self, ratios: LogRatios) -> torch.Tensor:
        if self.level == "token":
            log = ratios.log_ratio
        elif self.level == "sequence":
            log = ratios.over_tokens(ratios.log_ratio.sum(-1))
        else:
            log = ratios.over_tokens(ratios.sequence_mean(ratios.log_ratio))
        return bounded(log).exp() * ratios.selected

    def _bound(self, raw: torch.Tensor) -> torch.Tensor:
        if self.outside == "truncate":
            return raw.clamp(min=self.lower, max=self.upper)
        return raw.where(self._within(raw), 0.0)

    def _within(self, raw: torch.Tensor) -> torch.Tensor:
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
            require_positive("GammaWeights", name, getattr(self, name), is_finite=True)

    def weigh(self, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the weights, fp64 [batch, tokens], 0 where masked, and their metrics; names without prefix."""
        log = ratios.over_tokens(ratios.bounded.sum(-1)).clamp(math.log(1e-8), LOG_RATIO_BOUND)
        negative = ratios.required_advantages < 0
        k = torch.full_like(log, self.k_pos).masked_fill(negative, self.k_neg)
        scale = torch.full_like(log, self.lambda_pos).masked_fill(negative, self.lambda_neg)
        weights = (scale + k * log - scale * log.exp()).exp() * ratios.selected
        return weights, _metrics(weights[ratios.selected])


def truncated_importance_weights(
    trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None = None, *, cap: float = 2.0
) -> torch.Tensor:
    """Compute token-level truncated importance sampling weights: ``min(exp(trainer − rollout), cap)``.

    Return [batch, tokens], 0 where masked, without gradient, fp32 (fp64 for fp64 logprobs), within [0, cap]. Multiply
    the policy loss of each token by its weight. ``trainer_logprobs`` are the trainer's own, of the sampled tokens,
    before the optimizer step; ``rollout_logprobs`` were returned with these tokens. Both are natural logs, [batch,
    tokens] or ragged. ``correct`` does the same with metrics, and other recipes.

    Raises the errors of ``correct``, and ValueError for a cap that is not a positive, finite number.
    """
    require_positive("truncated_importance_weights", "cap", cap, is_finite=True)
    ratios = compare(trainer_logprobs, rollout_logprobs, mask)
    return (ratios.bounded.exp().clamp(max=cap) * ratios.selected).to(ratios.dtype)


def _metrics(weights: torch.Tensor) -> dict[str, float]:
    """Return the metrics of all tokens' weights that need no bounds.

    ``…_eff_sample_size`` is 1 / mean((w / mean w)²), in [0, 1]: 1 if all weights are equal, 0 if all are 0.
    """
    square = weights.square().mean().item()
    return {
        "rollout_is_mean": weights.mean().item(),
        "rollout_is_max": weights.max().item(),
        "rollout_is_min": weights.min().item(),
        "rollout_is_std": weights.std(correction=0).item(),
        "rollout_is_eff_sample_size": weights.mean().item() ** 2 / square if square > 0 else 0.0,
    }
