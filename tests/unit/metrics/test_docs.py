"""docs/metrics.md lists every metric as the tables declare it."""

from pathlib import Path

import pytest

from rollout_service.metrics.docs import rewritten
from rollout_service.metrics.table import METRICS

PAGE = Path(__file__).parents[3] / "docs/metrics.md"


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == rewritten(PAGE.read_text())


def test_every_metric_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in page] == []


def test_a_row_that_was_changed_by_hand_is_made_anew() -> None:
    page = PAGE.read_text()
    assert rewritten(page.replace("The newest committed version.", "The newest version.")) == page


def test_a_page_without_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="end of vllm"):
        rewritten(PAGE.read_text().replace("<!-- end of vllm -->", ""))
