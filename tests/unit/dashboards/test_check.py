"""The check of the dashboards fails for a panel, an alert or a variable without samples."""

from dashboards.check.answers import Answers, PanelAnswer
from dashboards.check.prometheus import Series
from dashboards.check.queries import DASHBOARDS, panel_queries

QUERIES = [query for board in DASHBOARDS for query in panel_queries(board)]


def test_only_panels_of_gpus_may_be_empty():
    empty = Answers(panels=[PanelAnswer(query, []) for query in QUERIES], variables={"replica": []}).empty
    missing = {f"{query.name}: {query.legend}" for query in QUERIES} - set(empty)
    assert missing == {"rollout: Decode attention spared by groups: {{replica}}"}
    assert "variable replica" in empty


def test_panels_with_samples_are_good():
    answered = [PanelAnswer(query, [Series({}, [(0.0, 1.0)])]) for query in QUERIES]
    assert Answers(panels=answered, variables={"replica": ["a"]}).good


def test_a_line_of_0_is_left_out_where_events_have_labels():
    nothing_yet = [query for query in QUERIES if "vector(0)" in query.expr]
    assert nothing_yet and all("or on () vector(0)" in query.expr for query in nothing_yet)
    assert [query for query in nothing_yet if "vector" in query.bare] == []
