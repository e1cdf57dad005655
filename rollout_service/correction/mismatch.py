"""The mismatch in two numbers, for trainers that log no more."""

from dataclasses import dataclass

from rollout_service.correction.batch import Rows
from rollout_service.correction.metrics import mismatch_metrics
from rollout_service.correction.ratios import compare


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Estimates of KL(rollout ‖ trainer) in nats per token. Merge several by a mean weighted with ``tokens``."""

    k1: float
    """Mean of ``rollout − trainer`` (verl's ``rollout_corr/kl``): unbiased, of either sign."""
    k3: float
    """Mean of ``exp(lr) − 1 − lr`` with ``lr = trainer − rollout`` (verl's ``rollout_corr/k3_kl``): never negative."""
    tokens: int
    """Number of tokens in the means."""


def measure_mismatch(trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None = None) -> Mismatch:
    """Compute k1 and k3 between the trainer's and the engine's logprobs of the sampled tokens, in fp64.

    All are natural logs, [batch, tokens] or ragged. ``mask`` is bool or 0/1; values at masked positions have no
    influence. In k3, and only there, ``lr`` is clamped to ±20. The estimators are from Schulman, "Approximating KL
    Divergence" (2020); ``correct`` computes more metrics.

    Raises the ValueErrors of ``as_batch``.
    """
    ratios = compare(trainer_logprobs, rollout_logprobs, mask)
    metrics = mismatch_metrics(ratios)
    return Mismatch(k1=metrics["kl"], k3=metrics["k3_kl"], tokens=int(ratios.selected.sum()))
