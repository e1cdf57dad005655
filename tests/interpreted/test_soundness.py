"""The kernel that looks at the numbers of many tensors finds each that may not be. Compiled: tests/gpu."""

import pytest
import torch

from rollout_service.quant import soundness
from rollout_service.quant.soundness import Allowed, are_allowed, table_of
from tests.support.soundness_cases import CASES, found_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_each_number_that_may_not_be_is_found(name):
    case = CASES[name]
    assert found_of(case, None, 40, 0, 0, CPU)
    for bad in case.unsound:
        assert not found_of(case, bad, 40, 0, 39, CPU), bad


@pytest.mark.parametrize("where", [0, 15, 16, 31, 32, 36])
@pytest.mark.parametrize("start", [0, 4])
def test_it_is_found_wherever_it_is(monkeypatch, where, start):
    monkeypatch.setattr(soundness, "_TILE_BYTES", 64)
    assert not found_of(CASES["float32"], float("nan"), 37, start, where, CPU)
    assert found_of(CASES["float32"], None, 37, start, where, CPU)


def test_of_no_numbers_all_may_be():
    assert bool(are_allowed(table_of([]), CPU))
    assert bool(are_allowed(table_of([soundness.Numbers(0, 0, Allowed(2, -1, 0, 0))]), CPU))
