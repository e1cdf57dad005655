"""Correcting a trainer's loss for rollouts that another engine sampled: weights (TIS) and mismatch statistics.

A rollout engine computes with other kernels and other number formats than the trainer, so the policy that sampled a
token is not exactly the one that is trained, even when both hold the same weights. Needs torch only.
"""

from rollout_service.correction.importance import truncated_importance_weights
from rollout_service.correction.mismatch import Mismatch, measure_mismatch

__all__ = ["Mismatch", "measure_mismatch", "truncated_importance_weights"]
