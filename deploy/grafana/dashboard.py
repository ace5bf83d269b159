"""Grafana's dashboard: the panels of `deploy.grafana.panels`, written as Grafana's JSON.

    python -m deploy.grafana.dashboard            writes deploy/grafana/dashboards/onward.json
    python -m deploy.grafana.dashboard --check    exits with 1 if that file is out of date

The file is committed, as Grafana reads files; `python -m benchmarks run dashboard` draws it without Grafana.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    ScaleDistributionConfig,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.heatmap import HeatmapColorOptions, YAxisConfig
from grafana_foundation_sdk.builders.heatmap import Panel as HeatMap
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.panels import ROWS, Kind, Panel

FILE = Path(__file__).parent / "dashboards" / "onward.json"

_COLORS = HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").exponent(0.5).steps(64)
_DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def render() -> str:
    """The dashboard as JSON, with a newline at its end."""
    board = (
        builders.Dashboard("Onward")
        .uid("onward")
        .description("Requests, latencies, the engine's steps and the process, for every model of every server.")
        .tags(["onward"])
        .refresh("15s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("model", "Model", "label_values(onward_num_requests_running, model_name)"))
        .with_variable(_choice("instance", "Server", 'label_values(up{job="onward"}, instance)'))
    )
    ids = count(1)
    for title, panels in ROWS.items():
        board = board.with_row(builders.Row(title).id(next(ids)))
        for panel in panels:
            board = board.with_panel(_panel(panel).id(next(ids)))
    return str(JSONEncoder(sort_keys=True, indent=1).encode(board.build())) + "\n"


def _choice(name: str, label: str, query: str) -> builders.QueryVariable:
    """A variable: a multiple choice of a label's values, by default all."""
    return (
        builders.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_DATA_SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> TimeSeries | Stat | HeatMap:
    built = _KINDS[panel.kind](panel)
    built = built.title(panel.title).description(panel.meaning).unit(panel.unit).datasource(_DATA_SOURCE)
    built = built.height(panel.height).span(panel.width)
    queries = {"{{model_name}}": panel.queries} if isinstance(panel.queries, str) else panel.queries
    for number, (legend, expression) in enumerate(queries.items()):
        query = Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        query = query.instant() if panel.kind is Kind.NUMBERS else query.range()
        if panel.kind is Kind.HEAT_MAP:
            query = query.format(PromQueryFormat.HEATMAP)
        built = built.with_target(query)
    return built


def _lines(panel: Panel) -> TimeSeries:
    built = (
        TimeSeries()
        .line_width(1)
        .fill_opacity(20 if panel.is_stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.is_logarithmic:
        built = built.scale_distribution(ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    else:
        built = built.min(0)
    if panel.is_stacked:
        built = built.stacking(StackingConfig().mode(StackingMode.NORMAL))
    if panel.colors:
        built = built.thresholds(_steps({-math.inf: "transparent", **panel.colors}))
        built = built.thresholds_style(GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return built


def _numbers(panel: Panel) -> Stat:
    colors = panel.colors or {-math.inf: "text"}
    return (
        Stat()
        .thresholds(_steps(colors))
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
    )


def _heat_map(panel: Panel) -> HeatMap:
    return HeatMap().calculate(False).y_axis(YAxisConfig().unit(panel.unit)).color(_COLORS)


def _steps(colors: Mapping[float, str]) -> builders.ThresholdsConfig:
    steps = [Threshold(value=None if bound == -math.inf else bound, color=color) for bound, color in colors.items()]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


_KINDS: Mapping[Kind, Callable[[Panel], TimeSeries | Stat | HeatMap]] = {
    Kind.LINES: _lines,
    Kind.NUMBERS: _numbers,
    Kind.HEAT_MAP: _heat_map,
}


def main(arguments: Sequence[str]) -> int:
    """Writes or checks the file; returns the exit status."""
    wanted = render()
    if list(arguments) == ["--check"]:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{FILE} is out of date: python -m deploy.grafana.dashboard", file=sys.stderr)
        return 1
    if arguments:
        print("python -m deploy.grafana.dashboard [--check]", file=sys.stderr)
        return 2
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
