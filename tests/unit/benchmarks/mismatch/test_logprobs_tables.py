"""docs/numerics.md has the figures of the results."""

from benchmarks.mismatch.logprobs_tables import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.mismatch.logprobs_tables"
