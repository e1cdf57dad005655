"""The reference pages of docs/ are what the code says, and each row says something."""

import pytest

from rollout_service.config import ServiceConfig
from scripts.reference import DOCS, PAGES, default_of, first_sentence, rewritten, setting_rows


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    page = (DOCS / name).read_text()
    assert page == rewritten(name, page)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("metrics.md", "|The newest committed version.|"),
        ("settings.md", "|Disable torch.compile and CUDA graphs.|"),
        ("http.md", "|Complete one prompt.|"),
    ],
)
def test_a_row_changed_by_hand_is_written_again(name, row):
    page = (DOCS / name).read_text()
    assert row in page
    assert rewritten(name, page.replace(row, "|else|")) == page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_a_mark_is_refused(name):
    part = list(PAGES[name])[-1]
    end = f"<!-- end of python -m scripts.reference: {part} -->"
    with pytest.raises(ValueError, match=f": {part} -->"):
        rewritten(name, (DOCS / name).read_text().replace(end, ""))


def test_each_setting_has_a_short_meaning():
    rows = [row for name, field in ServiceConfig.model_fields.items() for row in setting_rows(name, field.annotation)]
    assert len(rows) > 70
    assert [name for name, _, meaning in rows if not 0 < len(meaning.split()) <= 20] == []


def test_a_default_is_shown_with_the_other_values():
    engine = ServiceConfig.model_fields["engine"].annotation
    assert default_of(engine, "lm_head") == "`bfloat16`; `float32`"
    assert default_of(engine, "cuda_graph_sizes") == "`null`"


@pytest.mark.parametrize(
    ("docstring", "cell"),
    [
        ("One ``name``, of two\n    lines. More.", "One `name`, of two lines."),
        ("Bound of a|b; None: no bound", "Bound of a&#124;b; null: no bound"),
        ("Format (docs/kv_scales.md). More.", "Format ([kv_scales](kv_scales.md))."),
    ],
)
def test_a_docstring_becomes_one_cell(docstring, cell):
    assert first_sentence(docstring) == cell
