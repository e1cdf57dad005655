"""Plain rows → what the library is given, and back."""

import math

import pytest
import torch
from hypothesis import strategies as st

from rollout_service.correction import Corrected, Correction, correct
from rollout_service.correction import Rows as Given
from tests.unit.correction.expected import Rows

LOGPROB = st.floats(min_value=-40, max_value=0, width=32)
ROWS = st.lists(st.lists(st.tuples(LOGPROB, LOGPROB), max_size=5), min_size=1, max_size=5).filter(any)
UNUSABLE = st.sampled_from([math.nan, math.inf, -math.inf])

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def padded(rows: Rows, padding: float = math.nan, extra: int = 0) -> Batch:
    """Trainer's and rollout's logprobs fp64 [batch, tokens] and the mask; what is no token holds ``padding``."""
    width = max(map(len, rows)) + extra
    filled = [[*row, *[(padding, padding)] * (width - len(row))] for row in rows]
    both = torch.tensor(filled, dtype=torch.float64).view(len(rows), width, 2)
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return both[..., 0], both[..., 1], mask


def apply(trainer: Given, rollout: Given, mask: Given | None = None, correction: Correction | None = None) -> Corrected:
    """``correct``, with an advantage of -1 for every sequence if the recipe needs advantages."""
    needs = correction is not None and correction.needs_advantages
    advantages = [-1.0] * len(trainer) if needs else None
    return correct(trainer, rollout, mask, correction, advantages=advantages)


def ragged(rows: Rows) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same as fp64 rows of their own lengths."""
    return (
        [torch.tensor([trainer for trainer, _ in row], dtype=torch.float64) for row in rows],
        [torch.tensor([rollout for _, rollout in row], dtype=torch.float64) for row in rows],
    )


def unpadded(values: torch.Tensor, rows: Rows) -> list[list[float]]:
    """[batch, tokens] → the values of each row's tokens."""
    return [values[index, : len(row)].tolist() for index, row in enumerate(rows)]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def near(metrics: dict[str, float]) -> dict[str, object]:
    """What other orders of summation may give: deviations of large numbers are exact to these numbers' last digits."""
    rounding = 1e-14 * max(map(abs, metrics.values()))
    return {
        name: pytest.approx(value, rel=1e-6, abs=1e-9 + rounding * name.endswith("_std"))
        for name, value in metrics.items()
    }
