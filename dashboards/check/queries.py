"""The queries of the committed dashboards and alerts, as Grafana would send them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1]
DASHBOARDS = ("rollout", "mismatch")
_NOTHING = re.compile(r" or on \(\) vector\(0\)$")
_METRIC = re.compile(r"\b(?:ray_)?(?:rollout|vllm|serve)_[a-z0-9_]+\b")
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class PanelQuery:
    """One expression of a panel."""

    dashboard: str
    panel: str
    expr: str
    legend: str

    @property
    def bare(self) -> str:
        """Without the 0 that stands for nothing yet."""
        return _NOTHING.sub("", self.expr)

    @property
    def name(self) -> str:
        """As a person would name it."""
        return f"{self.dashboard}: {self.panel}"


@dataclass(frozen=True)
class Variable:
    """A choice at a dashboard's top that comes from a query."""

    name: str
    selector: str
    label: str


def dashboard(name: str) -> dict[str, object]:
    """A committed dashboard's JSON."""
    loaded: dict[str, object] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def panel_queries(name: str) -> Iterator[PanelQuery]:
    """Every expression of a dashboard, in the order of its panels."""
    panels = dashboard(name)["panels"]
    assert isinstance(panels, list)
    for panel in panels:
        for target in panel.get("targets") or []:
            yield PanelQuery(name, panel["title"], target["expr"], target["legendFormat"])


def variables(name: str) -> Iterator[Variable]:
    """Those of a dashboard that Prometheus answers."""
    templating = dashboard(name)["templating"]
    assert isinstance(templating, dict)
    for variable in templating["list"]:
        if variable["type"] == "query":
            found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert found, variable
            yield Variable(variable["name"], found[1], found[2])


def substituted(expr: str, values: Mapping[str, str], rate_interval: str) -> str:
    """``expr`` with Grafana's macro and the variables (name → regular expression) filled in.

    Raises ValueError if a ``$`` is left.
    """
    expr = expr.replace("$__rate_interval", rate_interval)
    for name, value in values.items():
        expr = re.sub(rf"\$(?:{name}\b|{{{name}}})", lambda _: value, expr)  # noqa: B023  called at once
    if "$" in expr:
        raise ValueError(f"a variable is left in {expr}")
    return expr


def metrics_of(expr: str) -> set[str]:
    """Names of the metrics in an expression, a histogram's without ``_bucket``."""
    return {name.removesuffix("_bucket") for name in _METRIC.findall(expr)}
