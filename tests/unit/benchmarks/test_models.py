"""docs/models.md is what serving and reading every family has found."""

from benchmarks.families.table import on_cpu
from tests.support import families


def test_every_family_has_a_row():
    assert {case["family"] for case in on_cpu()} == families.FAMILIES.keys()
