"""A complete recipe: weights, rejections and a veto, applied to one batch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.bounds import require_choice
from rollout_service.correction.metrics import mismatch_metrics
from rollout_service.correction.ratios import Advantages, MissingLogprobs, Rows, compare
from rollout_service.correction.rejection import Rejection, Veto, shares_rejected
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
    kept, metrics = ratios.selected, dict[str, float]()
    judges = (*recipe.rejections, *(() if recipe.veto is None else (recipe.veto,)))
    for judge in judges:
        keeps, measured = judge.judge(ratios)
        kept = kept & keeps
        metrics |= measured
    if judges:
        metrics |= shares_rejected("rollout_rs_", kept, ratios)
    if missing_logprobs != "refuse":
        metrics["rollout_missing_fraction"] = ratios.missing
    weights = ratios.selected.double()
    if recipe.weights is not None:
        weights, measured = recipe.weights.weigh(ratios)
        metrics |= measured
    metrics |= mismatch_metrics(ratios)
    return Corrected(
        weights=(weights * kept).to(ratios.dtype),
        mask=kept,
        # verl's prefix, so that metrics of both appear in one chart
        metrics={f"rollout_corr/{name}": value for name, value in metrics.items()},
        counted=kept if recipe.divides_by == "kept" else ratios.selected,
    )


def _require_type(name: str, value: object, *expected: type) -> None:
    if value is not None and not isinstance(value, expected):
        names = " or ".join(one.__name__ for one in expected)
        raise TypeError(f"{name}={value!r} must be of type {names}")
