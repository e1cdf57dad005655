"""What every panel and dashboard has in common, over Grafana's foundation SDK."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
PANELS_IN_A_LINE = 3
WIDTH, HEIGHT = 24 // PANELS_IN_A_LINE, 8

SERVICE = 'instance=~"$service"'
"""Selects metrics of the whole service."""
REPLICA = f'{SERVICE}, replica=~"$replica"'
"""Selects the service's metrics of chosen replicas."""
AT_NEWEST = f'on (version) count_values("version", rollout_latest_version{{{SERVICE}}})'
"""After ``and``: keeps the series of the newest version."""
APPLICATION = 'application=~"$application"'
"""Selects what processes count."""
ENGINE = f'{APPLICATION}, deployment=~"engine.*", replica=~"$replica"'
"""Selects what engine replicas count, also those of a group, ``engine-NAME``."""
VLLM = 'ReplicaId=~"$replica"'
"""Selects vLLM's own."""
OR_NOTHING_YET = " or on () vector(0)"
"""A counter of a process is missing until it has counted something: no events are a line at 0, not an empty panel.
``on ()``: the line ends once there is a series with labels."""


@dataclass(frozen=True)
class Query:
    """One PromQL expression of a panel."""

    expr: str
    legend: str
    right: bool = False
    """On an axis of its own at the right, in the unit ``right_unit`` of its panel."""


@dataclass(frozen=True)
class Panel:
    """One panel of time series."""

    title: str
    unit: str
    """Grafana's name of it, as in the SDK's models/units.py."""
    description: str
    """What it shows; what a bad value means, and what to do about it."""
    queries: Sequence[Query]
    warn_above: float | None = None
    """A red dashed line there."""
    warn_below: float | None = None
    stacked: bool = False
    steps: bool = False
    """The value holds until it changes: states and versions."""
    signed: bool = False
    """May be below 0."""
    logarithmic: bool = False
    right_unit: str = ""

    def built(self) -> timeseries.Panel:
        """As Grafana's model."""
        panel = timeseries.Panel().title(self.title).description(self.description).unit(self.unit)
        panel.datasource(DATASOURCE).span(WIDTH).height(HEIGHT)
        panel.line_width(1).fill_opacity(30 if self.stacked else 5).show_points(common.VisibilityMode.NEVER)
        panel.legend(_LEGEND).tooltip(_TOOLTIP)
        for index, query in enumerate(self.queries):
            panel.with_target(_target(query, "ABCDEFGH"[index]))
            if query.right:
                panel.override_by_query("ABCDEFGH"[index], _right_axis(self.right_unit))
        self._style(panel)
        return panel

    def _style(self, panel: timeseries.Panel) -> None:
        if not (self.signed or self.logarithmic):
            panel.min(0)
        if self.stacked:
            panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
        if self.steps:
            panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
        if self.logarithmic:
            scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
            panel.scale_distribution(scale)
        if self.warn_above is not None or self.warn_below is not None:
            panel.thresholds(_thresholds(self.warn_above, self.warn_below))
            style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
            panel.thresholds_style(style)


@dataclass(frozen=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: Sequence[Panel]


def assembled(uid: str, title: str, description: str, rows: Sequence[Row], others: Sequence[str]) -> str:
    """A dashboard's JSON; ``others``: uids of dashboards that it links to."""
    board = builders.Dashboard(title).uid(uid).description(description).tags(["rollout-service"])
    board.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    board.variables(list(_variables()))
    for other in others:
        link = builders.DashboardLink(other).type(dashboard.DashboardLinkType.LINK).url(f"/d/{other}")
        board.link(link.include_vars(True).keep_time(True))
    for row in rows:
        board.with_row(builders.Row(row.title))
        for panel in row.panels:
            board.with_panel(panel.built())
    model = board.build()
    for number, each in enumerate(model.panels or [], start=1):
        each.id_val = number
    return json.dumps(model, cls=JSONEncoder, indent=1, ensure_ascii=False) + "\n"


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id)
    return target.datasource(DATASOURCE).range()


def _right_axis(unit: str) -> list[dashboard.DynamicConfigValue]:
    return [
        dashboard.DynamicConfigValue("unit", unit),
        dashboard.DynamicConfigValue("custom.axisPlacement", "right"),
        dashboard.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
    ]


def _thresholds(above: float | None, below: float | None) -> builders.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color="green" if below is None else "red")]
    steps += [] if below is None else [dashboard.Threshold(value=below, color="green")]
    steps += [] if above is None else [dashboard.Threshold(value=above, color="red")]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _variables() -> Sequence[builders.DatasourceVariable | builders.QueryVariable]:
    datasource = builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    return (
        datasource,
        _variable("service", "Service", "rollout_latest_version", "instance", "Address of the service's HTTP port"),
        _variable(
            "application", "Application", "ray_rollout_sequences", "application",
            "Name of the Serve application of the processes; of several services give each its own",
        ),
        _variable(
            "replica", "Replica", 'rollout_replica_report_age_seconds{instance=~"$service"}', "replica",
            "Engine replicas that lived in the time shown",
        ),
    )  # fmt: skip


def _variable(name: str, label: str, selector: str, of: str, description: str) -> builders.QueryVariable:
    variable = builders.QueryVariable(name).label(label).description(description).datasource(DATASOURCE)
    variable.query({"query": f"label_values({selector}, {of})", "refId": name})
    variable.multi(True).include_all(True).all_value(".*").sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    variable.current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)


_LEGEND = (
    common_builders.VizLegendOptions()
    .display_mode(common.LegendDisplayMode.LIST)
    .placement(common.LegendPlacement.BOTTOM)
    .show_legend(True)
    .calcs(["lastNotNull"])
)
_TOOLTIP = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
