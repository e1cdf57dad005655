"""A complete recipe: weights, rejections and a veto, applied to one batch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.batch import Advantages, MissingLogprobs, Rows
from rollout_service.correction.bounds import require_choice
from rollout_service.correction.metrics import PREFIX, mismatch_metrics
from rollout_service.correction.ratios import LogRatios, compare
from rollout_service.correction.rejection import Rejection, Veto
from rollout_service.correction.rejection_metrics import rejection_metrics, total_rejection_metrics, veto_metrics
from rollout_service.correction.weight_metrics import applied_metrics, normalized, weight_metrics
from rollout_service.correction.weights import GammaWeights, ImportanceWeights
from rollout_service.protocol.truncation import warn_of_truncated_sampling

Denominator: TypeAlias = Literal["sampled", "kept"]
"""Denominator of a loss: all sampled tokens, or those that no rejection and no veto removed."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A recipe against the mismatch. The default does nothing but compute metrics. All parts use the original batch.

    Raises TypeError for a part of another type, ValueError for two rejections with one statistic or an unknown
    denominator.
    """

    weights: ImportanceWeights | GammaWeights | None = None
    """None: every token has weight 1."""
    rejections: tuple[Rejection, ...] = ()
    """A token is kept if every rejection keeps it."""
    veto: Veto | None = None
    """A sequence is kept if it has no vetoed token."""
    divides_by: Denominator = "kept"
    """``kept``: rejected tokens are removed from the denominator, too, as in verl, so that the others count more.
    ``sampled``: rejected tokens only have weight 0, as in NeMo-RL, OpenRLHF, SkyRL, slime, TRL and prime-rl. The two
    gradients differ by the share that is kept: with 90% rejected, by a factor of 10."""

    def __post_init__(self) -> None:
        _require_type("weights", self.weights, ImportanceWeights, GammaWeights)
        _require_type("veto", self.veto, Veto)
        if not isinstance(self.rejections, tuple):
            raise TypeError(f"rejections={self.rejections!r} must be a tuple of Rejection")
        for rejection in self.rejections:
            _require_type("rejections", rejection, Rejection)
        require_choice("Correction", "divides_by", self.divides_by, get_args(Denominator))
        statistics = [rejection.statistic for rejection in self.rejections]
        twice = {statistic for statistic in statistics if statistics.count(statistic) > 1}
        if twice:
            raise ValueError(f"Correction: {', '.join(sorted(twice))} rejects twice: give the tighter bounds only")

    @property
    def needs_advantages(self) -> bool:
        """Return True if ``correct`` needs ``advantages`` for this recipe."""
        return isinstance(self.weights, GammaWeights) or any(one.only_if is not None for one in self.rejections)


@dataclass(frozen=True, slots=True)
class Corrected:
    """The factors and the denominator of a trainer's loss, and metrics."""

    weights: torch.Tensor
    """[batch, tokens], fp32 (fp64 if a logprob was), without gradient; 0 where masked or rejected."""
    mask: torch.Tensor
    """The sampled tokens that were not rejected, bool [batch, tokens]. May select none."""
    metrics: dict[str, float]
    """``rollout_corr/…``, of the original batch; every value is finite."""
    counted: torch.Tensor
    """Tokens in the loss's denominator, bool [batch, tokens]: ``mask`` if the recipe divides by kept tokens, otherwise
    all sampled tokens. For a step computed in parts, the denominator is its sum over all micro-batches and ranks. Its
    row sums are those for a mean over sequences."""

    @property
    def denominator(self) -> int:
        """Return the number of tokens by which the sum of this batch's loss is divided, as in the recipe's source; at
        least 1."""
        return max(int(self.counted.sum()), 1)


def correct(
    trainer_logprobs: Rows,
    rollout_logprobs: Rows,
    mask: Rows | None = None,
    correction: Correction | None = None,
    *,
    advantages: Advantages | None = None,
    missing_logprobs: MissingLogprobs = "refuse",
    truncated_sampling: bool = False,
) -> Corrected:
    """Compute weights, mask and metrics of a batch with a recipe; None: metrics only.

    ``trainer_logprobs`` are the trainer's, of the sampled tokens, before the optimizer step. ``rollout_logprobs`` were
    returned with those tokens. Both are natural logs: tensors [batch, tokens] of any float dtype, or ragged, with a 1-D
    tensor or a list of numbers per sequence. ``mask`` has the same form, bool or 0/1, and may be omitted if one of them
    is ragged. Values at masked positions, including NaN, have no influence. Computed in fp64.

    ``advantages``: required if ``correction.needs_advantages``; only their signs matter. One per sequence or per token.

    ``missing_logprobs``: the treatment of sampled tokens whose rollout logprob is NaN or infinite. ``refuse`` raises
    ValueError. ``ratio_1`` takes the trainer's logprob, as TRL and AReaL do. ``mask`` removes the tokens from the
    batch, also from the denominator. The last two report ``rollout_missing_fraction``.

    ``truncated_sampling``: True if a rollout of the batch has this mark and ``trainer_logprobs`` are not renormalized
    over its support (``SamplingSupport``). Every ratio then contains the kept mass, so a TruncatedSamplingWarning is
    issued, once a process.

    Raises ValueError if shapes or lengths differ, if no token is selected, if the mask holds anything but 0 and 1, if a
    selected logprob or advantage is not finite (with its position), or if required advantages are absent; TypeError if
    ``correction`` is no ``Correction``.
    """
    _require_type("correction", correction, Correction)
    if truncated_sampling:
        warn_of_truncated_sampling("correct")
    recipe = correction or Correction()
    ratios = compare(trainer_logprobs, rollout_logprobs, mask, advantages, missing_logprobs)
    kept, metrics = _reject(recipe, ratios)
    if missing_logprobs != "refuse":
        metrics["rollout_missing_fraction"] = ratios.missing
    weights = ratios.selected.double()
    if recipe.weights is not None:
        weights, of_weights = _weigh(recipe.weights, ratios)
        metrics |= of_weights
    metrics |= mismatch_metrics(ratios)
    return Corrected(
        weights=(weights * kept).to(ratios.dtype),
        mask=kept,
        metrics={PREFIX + name: value for name, value in metrics.items()},
        counted=kept if recipe.divides_by == "kept" else ratios.selected,
    )


def _weigh(recipe: ImportanceWeights | GammaWeights, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
    """Return weights fp64 [batch, tokens], rejected tokens not yet zero, and their metrics."""
    if isinstance(recipe, GammaWeights):
        weights = recipe.weights(ratios)
        return weights, applied_metrics(weights, ratios)
    raw = recipe.ratios(ratios)
    weights = recipe.bound(raw, ratios.selected)
    metrics = weight_metrics(recipe, raw, weights, ratios)
    if not recipe.batch_normalize:
        return weights, metrics
    weights, factor = normalized(recipe, weights, ratios)
    return weights, metrics | factor


def _reject(recipe: Correction, ratios: LogRatios) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the tokens that every rejection and the veto keep, bool [batch, tokens], and the metrics of each."""
    kept = ratios.selected
    metrics: dict[str, float] = {}
    for rejection in recipe.rejections:
        measured = rejection.measure(ratios)
        keeps = rejection.kept_tokens(measured, ratios)
        kept = kept & keeps
        metrics |= rejection_metrics(rejection, measured, keeps, ratios)
    if recipe.veto is not None:
        catastrophic = recipe.veto.catastrophic(ratios)
        kept = kept & ~ratios.over_tokens(catastrophic.any(-1))
        metrics |= veto_metrics(catastrophic, ratios)
    if recipe.rejections or recipe.veto is not None:
        metrics |= total_rejection_metrics(kept, ratios)
    return kept, metrics


def _require_type(name: str, value: object, *expected: type) -> None:
    if value is not None and not isinstance(value, expected):
        names = " or ".join(one.__name__ for one in expected)
        raise TypeError(f"{name}={value!r} must be of type {names}")
