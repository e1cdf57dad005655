"""Metrics of rejection: verl's ``rollout_rs_…``, and the veto's counters."""

import torch

from rollout_service.correction.ratios import LogRatios
from rollout_service.correction.rejection import Rejection


def rejection_metrics(
    recipe: Rejection, measured: torch.Tensor, kept: torch.Tensor, ratios: LogRatios
) -> dict[str, float]:
    """Return the metrics of one statistic, [batch, tokens] or [batch], that kept the tokens ``kept``, bool [batch,
    tokens]; names without prefix.

    ``_max``, ``_min`` and the fractions are of tokens for a ``token_`` statistic and of sequences for a ``seq_`` one.
    ``_mean`` and ``_std`` are always over tokens; for ``_std`` the statistic is clamped to its bounds (verl).
    """
    smallest, largest = recipe.limits
    per_token = measured if recipe.of_tokens else ratios.over_tokens(measured)
    tokens = per_token[ratios.selected]
    rows = (ratios.sequence_mean(measured) if recipe.of_tokens else measured)[ratios.rows]
    units = tokens if recipe.of_tokens else rows
    return {
        f"rollout_rs_{recipe.statistic}_{name}": value
        for name, value in {
            "mean": tokens.mean().item(),
            "max": units.max().item(),
            "min": units.min().item(),
            "std": tokens.clamp(smallest, largest).std(correction=0).item(),
            "fraction_high": _share(units > largest),
            "fraction_low": _share(units < smallest),
            "seq_mean": rows.mean().item(),
            "seq_std": rows.std().item() if rows.numel() > 1 else 0.0,
            "seq_max": rows.max().item(),
            "seq_min": rows.min().item(),
            "seq_max_deviation": rows.abs().max().item(),
            "seq_fraction_high": _share(rows > largest),
            "seq_fraction_low": _share(rows < smallest),
            **_shares_rejected(kept, ratios),
        }.items()
    }


def total_rejection_metrics(kept: torch.Tensor, ratios: LogRatios) -> dict[str, float]:
    """Return the metrics of all rejections together. ``kept``: bool [batch, tokens]. Names without prefix."""
    return {f"rollout_rs_{name}": value for name, value in _shares_rejected(kept, ratios).items()}


def veto_metrics(catastrophic: torch.Tensor, ratios: LogRatios) -> dict[str, float]:
    """Return the shares of vetoed tokens, bool [batch, tokens], and of vetoed sequences."""
    return {
        "rollout_is_catastrophic_token_fraction": _share(catastrophic[ratios.selected]),
        "rollout_is_veto_fraction": _share(catastrophic.any(-1)[ratios.rows]),
    }


def _shares_rejected(kept: torch.Tensor, ratios: LogRatios) -> dict[str, float]:
    """Return the shares of tokens that are not kept, and of sequences that lost at least one token."""
    rejected = ~kept & ratios.selected
    return {
        "masked_fraction": _share(rejected[ratios.selected]),
        "seq_masked_fraction": _share(rejected.any(-1)[ratios.rows]),
    }


def _share(condition: torch.Tensor) -> float:
    return condition.double().mean().item()
