"""The kernel that looks at the numbers of many tensors, compiled."""

import pytest
import torch

from tests.support.soundness_cases import CASES, found_of

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("start", [0, 4])
def test_each_number_that_may_not_be_is_found(name, start):
    case = CASES[name]
    for elements in (1, 40, 100_003):
        assert found_of(case, None, elements, start, 0, GPU)
        for bad in case.unsound:
            for where in {0, elements // 2, elements - 1}:
                assert not found_of(case, bad, elements, start, where, GPU), (bad, where)
