"""Small batches, and what plain Python makes of them."""

import math
from statistics import fmean

import torch
from hypothesis import strategies as st

from rollout_service.monitor.statistics import Statistics

LOGPROB = st.floats(min_value=-15, max_value=0, width=32)
SEQUENCE = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=6)
BATCH = st.lists(SEQUENCE, min_size=1, max_size=5)

Batch = list[list[tuple[float, float]]]
"""Sequences of (trainer, rollout) logprobs."""
BOUND = 2.0


def statistics_of(batch: Batch, bound: float = BOUND) -> Statistics:
    logs = log_ratios(batch)
    tokens = torch.tensor([log for row in logs for log in row], dtype=torch.float64)
    return Statistics.of(tokens, torch.tensor([math.fsum(row) for row in logs], dtype=torch.float64), bound)


def log_ratios(batch: Batch) -> list[list[float]]:
    return [[trainer - rollout for trainer, rollout in row] for row in batch]


def expected(batch: Batch, bound: float = BOUND) -> dict[str, float]:
    """The fields of a MismatchRow that do not come from a sketch."""
    logs = [log for row in log_ratios(batch) for log in row]
    weights = [min(math.exp(log), bound) for log in logs]
    sums = [max(-20.0, min(math.fsum(row), 20.0)) for row in log_ratios(batch)]
    return {
        "tokens": len(logs),
        "sequences": len(batch),
        "k1": fmean(-log for log in logs),
        "k3": fmean(math.expm1(log) - log for log in logs),
        "chi2_token": fmean(math.expm1(2 * log) for log in logs),
        "chi2_seq": fmean(math.expm1(2 * total) for total in sums),
        "ess_ratio": math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / len(logs),
        "prob_error": fmean(math.exp(abs(log)) for log in logs),
        "abs_diff_max": max(abs(log) for log in logs),
        "outside_ratio": fmean(math.exp(log) > bound or math.exp(log) < 1 / bound for log in logs),
    }
