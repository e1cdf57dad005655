"""Rejection of tokens and sequences: divergence beyond a bound, or one extreme token (veto). With verl's metrics."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.bounds import require_bounds, require_choice, require_positive
from rollout_service.correction.ratios import LOG_RATIO_BOUND, LogRatios, k3, mult_prob_error, share

Statistic: TypeAlias = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
    "token_prob_diff", "seq_mean_prob_diff", "seq_mean_prob_error", "seq_mean_ratio_diff",
    "token_binary_kl", "seq_mean_binary_kl", "token_binary_kl_both", "token_m2",
]  # fmt: skip
OnlyIf: TypeAlias = Literal["diverging", "negative"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Keeps tokens or sequences with a small estimate of KL(rollout ‖ trainer); removes the rest from the mask.

    For each token, with ``lr = trainer − rollout`` clamped to ±20: ``k1 = −lr``, ``k2 = lr²/2``, ``k3 = exp(lr) − 1 −
    lr`` (Schulman, "Approximating KL Divergence", 2020). A ``seq_`` statistic reduces a sequence's tokens and keeps or
    drops all of them: ``seq_mean_k1`` is the geometric mean of the ratios, ``seq_sum_k1`` their product. Names and
    formulas are from verl's rollout correction. The others, with ``p = π_trainer`` and ``μ = π_rollout`` of the token:

    - ``prob_diff``: |p − μ| (prime-rl's IPO, OpenRLHF's ``tv``)
    - ``prob_error``: exp |lr|, at least 1 (NeMo-RL's ``seq_logprob_error_threshold``)
    - ``ratio_diff``: |ρ − 1| (open-instruct's TVPO)
    - ``binary_kl``: D(μ‖p) of two outcomes, this token or any other, ``a ln(a/b) + (1 − a) ln((1 − a)/(1 − b))`` with
      both clamped to [1e-6, 1 − 1e-6] (OpenRLHF); ``binary_kl_both``: the larger of D(μ‖p) and D(p‖μ) (KPop)
    - ``m2``: the mean of lr², not clamped, over all tokens of the batch with an lr² up to this token's. Its bound drops
      the tokens with the largest lr² until the mean of the rest is within it (M2PO).

    Raises ValueError for an unknown statistic, for bounds that are not positive or in the wrong order, and for
    ``lower`` with a statistic other than k1.
    """

    statistic: Statistic
    upper: float
    """For k1, keep up to ``log(upper)``, so this bounds the ratio π_rollout / π_trainer (the inverse of a weight!). For
    k2 and k3, keep up to ``upper`` nats. For others, keep up to ``upper``."""
    lower: float | None = None
    """Only for k1: keep from ``log(lower)``. None: 1/``upper``."""
    only_if: OnlyIf | None = None
    """Reject a token beyond the bounds only under this condition; ``correct`` then needs advantages A. ``diverging``:
    A · lr > 0, so the update would move the token's probability further from the rollout's. ``negative``: A < 0.
    None: always."""

    def __post_init__(self) -> None:
        require_choice("Rejection", "statistic", self.statistic, get_args(Statistic))
        if self.only_if is not None:
            require_choice("Rejection", "only_if", self.only_if, get_args(OnlyIf))
        owner = f"Rejection {self.statistic}"
        if not self._is_ratio and self.lower is not None:
            raise ValueError(f"{owner}: lower={self.lower}, but it is never negative and has only an upper bound")
        require_positive(owner, "upper", self.upper)
        require_bounds(owner, self.lower, self.upper)
        if self._is_ratio and self.lower is None and not 1 <= self.upper < math.inf:
            raise ValueError(
                f"{owner}: upper={self.upper} without lower is a band [1/upper, upper]: give a finite number of at "
                "least 1"
            )

    def judge(self, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mask of kept tokens, bool [batch, tokens], and the statistic's metrics; names without prefix.

        ``_max``, ``_min`` and the fractions are of tokens for a ``token_`` statistic and of sequences for a ``seq_``
        one. ``_mean`` and ``_std`` are always over tokens; for ``_std`` the statistic is clamped to its bounds (verl).
        """
        smallest, largest = self._limits()
        of_tokens = self.statistic.startswith("token_")
        measured = self._measure(ratios)
        per_token = measured if of_tokens else ratios.over_tokens(measured)
        kept = (per_token >= smallest) & (per_token <= largest)
        if self.only_if is not None:
            advantages = ratios.required_advantages
            applies = advantages < 0 if self.only_if == "negative" else advantages.sign() * ratios.log_ratio > 0
            kept = kept | ~applies
        tokens = per_token[ratios.selected]
        rows = (ratios.sequence_mean(measured) if of_tokens else measured)[ratios.rows]
        units = tokens if of_tokens else rows
        metrics = {
            "mean": tokens.mean().item(),
            "max": units.max().item(),
            "min": units.min().item(),
            "std": tokens.clamp(smallest, largest).std(correction=0).item(),
            "fraction_high": share(units > largest),
            "fraction_low": share(units < smallest),
            "seq_mean": rows.mean().item(),
            "seq_std": rows.std().item() if rows.numel() > 1 else 0.0,
            "seq_max": rows.max().item(),
            "seq_min": rows.min().item(),
            "seq_max_deviation": rows.abs().max().item(),
            "seq_fraction_high": share(rows > largest),
            "seq_fraction_low": share(rows < smallest),
        }
        named = {f"rollout_rs_{self.statistic}_{name}": value for name, value in metrics.items()}
        return kept, named | shares_rejected(f"rollout_rs_{self.statistic}_", kept, ratios)

    def _limits(self) -> tuple[float, float]:
        """Return the smallest and largest kept value of the statistic, in its own unit."""
        if not self._is_ratio:
            return -math.inf, self.upper
        return math.log(1.0 / self.upper if self.lower is None else self.lower), math.log(self.upper)

    @property
    def _is_ratio(self) -> bool:
        return self.statistic.endswith("k1")

    def _measure(self, ratios: LogRatios) -> torch.Tensor:
        """Return the statistic, fp64: [batch, tokens] for ``token_``, [batch] for ``seq_``. In nats for k1, k2 and
        k3."""
        level = next(level for level in ("token", "seq_sum", "seq_mean", "seq_max") if level in self.statistic)
        divergence = _OF_TOKENS[self.statistic.removeprefix(f"{level}_")](ratios) * ratios.selected
        if level == "token":
            return divergence
        if level == "seq_sum":
            return divergence.sum(-1)
        return ratios.sequence_mean(divergence) if level == "seq_mean" else divergence.amax(-1)


@dataclass(frozen=True, slots=True)
class Veto:
    """Drops a whole sequence if one token has a ratio π_trainer / π_rollout outside [lower, upper].

    ``lower`` alone is slime's veto (1e-4 in verl's early versions, too), both are SkyRL's outlier mask. The log-ratio
    is not clamped here. Raises ValueError for bounds that are not positive, in the wrong order, or both None.
    """

    lower: float | None = 1e-4
    upper: float | None = None

    def __post_init__(self) -> None:
        if self.lower is None and self.upper is None:
            raise ValueError("Veto: neither lower nor upper is given: leave the veto out instead")
        require_bounds("Veto", self.lower, self.upper)

    def judge(self, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mask of kept tokens, bool [batch, tokens], and the shares of vetoed tokens and sequences."""
        outside = torch.zeros_like(ratios.selected)
        if self.lower is not None:
            outside = outside | (ratios.log_ratio < math.log(self.lower))
        if self.upper is not None:
            outside = outside | (ratios.log_ratio > math.log(self.upper))
        vetoed = (outside & ratios.selected).any(-1)
        return ~ratios.over_tokens(vetoed), {
            "rollout_is_catastrophic_token_fraction": share(outside[ratios.selected]),
            "rollout_is_veto_fraction": share(vetoed[ratios.rows]),
        }


def shares_rejected(prefix: str, kept: torch.Tensor, ratios: LogRatios) -> dict[str, float]:
    """Return the shares of tokens that are not kept, and of sequences that lost at least one token."""
    rejected = ~kept & ratios.selected
    return {
        f"{prefix}masked_fraction": share(rejected[ratios.selected]),
        f"{prefix}seq_masked_fraction": share(rejected.any(-1)[ratios.rows]),
    }


def _binary_kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of two Bernoulli distributions with these probabilities; any shape, fp64, at least 0."""
    # fp64: in fp32 the two terms cancel to values below 0
    a, b = a.clamp(1e-6, 1 - 1e-6), b.clamp(1e-6, 1 - 1e-6)
    return (a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()).clamp(min=0.0)


def _prob_diff(ratios: LogRatios) -> torch.Tensor:
    difference = (ratios.trainer.exp() - ratios.rollout.exp()).abs()
    # beyond 1 only for logprobs above 0, a caller's mistake: far above, exp is infinite and the metrics were NaN
    largest = math.exp(LOG_RATIO_BOUND)
    return difference.nan_to_num(nan=largest).clamp(max=largest)


def _binary_kl_both(ratios: LogRatios) -> torch.Tensor:
    trainer, rollout = ratios.trainer.exp(), ratios.rollout.exp()
    return torch.maximum(_binary_kl(rollout, trainer), _binary_kl(trainer, rollout))


def _m2(ratios: LogRatios) -> torch.Tensor:
    squares = ratios.log_ratio[ratios.selected].square()
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # the last of equal values, so that the order of the batch has no influence
    last = torch.searchsorted(ordered, squares, right=True) - 1
    return torch.zeros_like(ratios.log_ratio).masked_scatter(ratios.selected, means[last])


_OF_TOKENS: dict[str, Callable[[LogRatios], torch.Tensor]] = {
    "k1": lambda ratios: -ratios.bounded,
    "k2": lambda ratios: 0.5 * ratios.bounded.square(),
    "k3": lambda ratios: k3(ratios.log_ratio),
    "prob_diff": _prob_diff,
    "prob_error": lambda ratios: mult_prob_error(ratios.log_ratio),
    "ratio_diff": lambda ratios: torch.expm1(ratios.bounded).abs(),
    "binary_kl": lambda ratios: _binary_kl(ratios.rollout.exp(), ratios.trainer.exp()),
    "binary_kl_both": _binary_kl_both,
    "m2": _m2,
}
