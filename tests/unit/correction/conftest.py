"""Batches for every test of the correction, small enough to be checked by hand."""

import math

import pytest

from tests.unit.correction.expected import Rows


@pytest.fixture
def rows() -> Rows:
    """Four sequences: near, far above, empty, far below; ratios from 0.00005 to 6."""
    return [
        [(math.log(0.31), math.log(0.30)), (math.log(0.5), math.log(0.5)), (math.log(0.097), math.log(0.1))],
        [(math.log(0.6), math.log(0.1)), (math.log(0.9), math.log(0.4))],
        [],
        [(math.log(0.00002), math.log(0.4)), (math.log(0.2), math.log(0.5)), (-1.0, -1.25), (-0.5, -0.375)],
    ]
