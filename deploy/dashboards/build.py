"""Turns a dashboard into Grafana's JSON, by Grafana's own typed builders."""

import json

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.panel import VARIABLES, Dashboard, Panel, Query

#: Sizes of graphs and of single numbers, in Grafana's grid of 24 columns.
_WIDTH, _HEIGHT, _STAT_WIDTH, _STAT_HEIGHT = 12, 8, 6, 4
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def to_json(one: Dashboard) -> str:
    """Returns the content of a dashboard's file, as it is committed and provisioned."""
    made = (
        dashboard.Dashboard(one.title)
        .uid(f"blockrelay-{one.name}")
        .tags(["blockrelay"])
        .readonly()
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            dashboard.DashboardLink("Blockrelay")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["blockrelay"])
            .as_dropdown(True)
        )
    )
    for name in one.variables:
        made.with_variable(_variable(name))
    for heading, panels in one.rows:
        made.with_row(dashboard.Row(heading))
        for panel in panels:
            made.with_panel(_BUILDERS[panel.kind](panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variable(label: str) -> dashboard.QueryVariable:
    """Returns a choice among all values of a label; its "All" leaves out series without the label."""
    return (
        dashboard.QueryVariable(label)
        .datasource(_SOURCE)
        .query(VARIABLES[label])
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".+")
        .multi(True)
    )


def _target(number: int, query: Query) -> prometheus.Dataquery:
    """Returns a query of a panel; `number` counts the panel's queries from 0."""
    return (
        prometheus.Dataquery()
        .ref_id(chr(ord("A") + number))
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .range()
    )


def _graph(panel: Panel) -> timeseries.Panel:
    """Returns a panel of lines over time."""
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(_WIDTH)
        .height(_HEIGHT)
        .min(0)
        .fill_opacity(10)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    for number, query in enumerate(panel.queries):
        made.with_target(_target(number, query))
    return made


def _stat(panel: Panel) -> stat.Panel:
    """Returns a panel with the last value as a number."""
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(_STAT_WIDTH)
        .height(_STAT_HEIGHT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(BigValueGraphMode.AREA)
        .color_mode(BigValueColorMode.VALUE)
    )
    for number, query in enumerate(panel.queries):
        made.with_target(_target(number, query))
    return made


def _heat_map(panel: Panel) -> heatmap.Panel:
    """Returns a heat map of a histogram: each row is a bucket of Prometheus, its colour the number of values."""
    (query,) = panel.queries
    return (
        heatmap.Panel()
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .span(_WIDTH)
        .height(_HEIGHT)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .show_y_histogram()
        .with_target(_target(0, query).format(PromQueryFormat.HEATMAP))
    )


_BUILDERS = {"graph": _graph, "number": _stat, "heat map": _heat_map}
