"""Correct a trainer's loss for rollouts that another engine sampled: weights, rejection, and mismatch statistics.

A rollout engine uses other kernels and number formats than the trainer, so the policy that sampled a token differs from
the trained one, even with the same weights. ``correct`` applies a recipe (``Correction``, or a published one by
``preset``) to a batch. Needs only torch; docs/correction.md explains it.
"""

from rollout_service.correction.metrics import Mismatch, measure_mismatch
from rollout_service.correction.presets import PRESETS, preset
from rollout_service.correction.ratios import Rows
from rollout_service.correction.recipe import Corrected, Correction, correct
from rollout_service.correction.rejection import Rejection, Veto
from rollout_service.correction.staleness import fresh_tokens, token_lag, token_versions
from rollout_service.correction.support import SamplingSupport
from rollout_service.correction.weights import GammaWeights, ImportanceWeights, truncated_importance_weights
from rollout_service.protocol.truncation import TruncatedSamplingWarning

__all__ = [
    "PRESETS",
    "Corrected",
    "Correction",
    "GammaWeights",
    "ImportanceWeights",
    "Mismatch",
    "Rejection",
    "Rows",
    "SamplingSupport",
    "TruncatedSamplingWarning",
    "Veto",
    "correct",
    "fresh_tokens",
    "measure_mismatch",
    "preset",
    "token_lag",
    "token_versions",
    "truncated_importance_weights",
]
