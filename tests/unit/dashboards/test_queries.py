"""Queries are sent as Grafana would send them."""

import pytest

from dashboards.check.queries import DASHBOARDS, PanelQuery, panel_queries, substituted, variables

VALUES = {"service": "s:8000", "application": "rollout", "replica": "a|b"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_committed_query_is_left_without_a_variable(name: str) -> None:
    queries = list(panel_queries(name))
    assert queries and all("$" not in substituted(query.expr, VALUES, "1m") for query in queries)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_each_variable_is_queried_after_those_it_depends_on(name: str) -> None:
    known: dict[str, str] = {}
    for variable in variables(name):
        substituted(variable.selector, known, "1m")
        known[variable.name] = "x"
    assert known.keys() == VALUES.keys()


def test_macro_and_variables_are_filled_in() -> None:
    expr = 'rate(x{instance=~"$service", replica=~"${replica}"}[$__rate_interval])'
    assert substituted(expr, VALUES, "30s") == 'rate(x{instance=~"s:8000", replica=~"a|b"}[30s])'


def test_a_variable_that_no_one_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\$services"):
        substituted('x{instance=~"$services"}', VALUES, "30s")


def test_nothing_yet_is_no_sample() -> None:
    assert PanelQuery("rollout", "p", "sum(rate(x[1m])) or vector(0)", "x").bare == "sum(rate(x[1m]))"
