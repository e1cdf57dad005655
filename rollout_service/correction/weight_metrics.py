"""Metrics of a batch's importance weights: verl's ``rollout_is_…``."""

import torch

from rollout_service.correction.ratios import LogRatios
from rollout_service.correction.weights import ImportanceWeights


def weight_metrics(
    recipe: ImportanceWeights, raw: torch.Tensor, weights: torch.Tensor, ratios: LogRatios
) -> dict[str, float]:
    """Return metrics of the ratios ``raw`` and the bounded ``weights``, both [batch, tokens], before batch
    normalization.

    Names are without prefix. Fractions are of tokens, or of sequences if the level is not ``token``. ``rollout_is_max``
    and ``_min`` are of the bounded weights for tokens and of the ratios for sequences (verl). ``_eff_sample_size`` is 1
    / mean((w / mean w)²) over tokens, in [0, 1]: 1 if all weights are equal, 0 if all are 0.
    """
    applied = weights[ratios.selected]
    rows = ratios.sequence_mean(raw)[ratios.rows]
    counted = raw[ratios.selected] if recipe.level == "token" else rows
    shown = applied if recipe.level == "token" else rows
    metrics = applied_metrics(weights, ratios) | {
        "rollout_is_max": shown.max().item(),
        "rollout_is_min": shown.min().item(),
        "rollout_is_ratio_fraction_high": _share(counted > recipe.upper),
        "rollout_is_ratio_fraction_low": _share(counted < recipe.reported_lower),
    }
    if recipe.outside == "mask":
        metrics["rollout_is_oob_ratio"] = _share(~recipe.within(raw[ratios.selected]))
    return metrics | _per_sequence(recipe, rows, ratios.sequence_mean(weights)[ratios.rows])


def applied_metrics(weights: torch.Tensor, ratios: LogRatios) -> dict[str, float]:
    """Return the metrics of the weights [batch, tokens] that need no bounds; names without prefix."""
    applied = weights[ratios.selected]
    return {
        "rollout_is_mean": applied.mean().item(),
        "rollout_is_max": applied.max().item(),
        "rollout_is_min": applied.min().item(),
        "rollout_is_std": applied.std(correction=0).item(),
        "rollout_is_eff_sample_size": _effective_sample_size(applied),
    }


def normalized(
    recipe: ImportanceWeights, weights: torch.Tensor, ratios: LogRatios
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights [batch, tokens] divided by their mean, and the mean as ``rollout_is_batch_norm_factor``.

    The mean is over tokens, or over sequences if the level is not ``token``. If all weights are 0, they stay unchanged
    and the factor is 1, as in verl.
    """
    values = weights[ratios.selected] if recipe.level == "token" else ratios.sequence_mean(weights)[ratios.rows]
    mean = values.mean().item()
    factor = mean if mean > 1e-8 else 1.0
    return weights / factor, {"rollout_is_batch_norm_factor": factor}


def _per_sequence(recipe: ImportanceWeights, raw: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """Return metrics of the mean ratio and mean weight of each sequence [sequences]."""
    return {
        "rollout_is_seq_mean": weights.mean().item(),
        "rollout_is_seq_std": weights.std().item() if weights.numel() > 1 else 0.0,
        "rollout_is_seq_max": weights.max().item(),
        "rollout_is_seq_min": weights.min().item(),
        "rollout_is_seq_max_deviation": (weights - 1.0).abs().max().item(),
        "rollout_is_seq_fraction_high": _share(raw > recipe.upper),
        "rollout_is_seq_fraction_low": _share(raw < recipe.reported_lower),
    }


def _effective_sample_size(weights: torch.Tensor) -> float:
    square = weights.square().mean().item()
    return weights.mean().item() ** 2 / square if square > 0 else 0.0


def _share(condition: torch.Tensor) -> float:
    return condition.double().mean().item()
