"""A part of a page is replaced, and nothing else."""

import pytest

from benchmarks.common.marked import with_part

PAGE = "before\n<!-- made by it -->\nold\n<!-- end of it -->\nafter\n"


def test_what_lies_between_the_marks_is_replaced() -> None:
    assert with_part(PAGE, "it", "| new |\n") == "before\n<!-- made by it -->\n| new |\n<!-- end of it -->\nafter\n"


@pytest.mark.parametrize(
    "page", ["", PAGE + PAGE, PAGE.replace("<!-- end of it -->", ""), "<!-- end of it -->\n<!-- made by it -->\n"]
)
def test_a_page_without_the_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="made by it"):
        with_part(page, "it", "new")
