"""docs/models.md is what serving and reading every family has found."""

from benchmarks.common import results
from benchmarks.families.table import CPU
from tests.support import families


def test_every_family_has_a_row():
    assert {case["family"] for case in results.cases("models", machine_name=CPU)} == families.FAMILIES.keys()
