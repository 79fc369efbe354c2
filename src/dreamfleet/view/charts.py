"""Any metric of any runs as curves, and the options of all charts.

Groups are those of `dreamfleet plot`: runs that differ only in their seed are one curve.

The library runs options whose key starts with a colon as JavaScript. So no key comes from a run.
All colours work on light and dark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
from msgspec import Meta

from dreamfleet.plotting import (
    Curve,
    Group,
    Panel,
    PlottedRun,
    Scores,
    action_repeat,
    panels_of,
)
from dreamfleet.statistics import Floats
from dreamfleet.view.reading import thinned
from dreamfleet.view.runs import EVALUATION, SCORE, Run

Axis = Literal["steps", "frames", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)
COLORS = ("#2b87d1", "#d95568", "#3a9d68", "#9a73cc", "#c9922a", "#4fa3ae")
GREY = "#8792a2"
_FAINT = "rgba(128,140,156,.16)"
_BINS, _METRIC_POINTS, _MAX_DOTS = 60, 500, 400


@dataclass(frozen=True)
class CurveOptions:
    """How curves are drawn."""

    axis: Axis = "steps"
    smoothing: Annotated[float, Meta(ge=0, le=0.98)] = 0.0
    """Weight of the previous point, from 0 to below 1."""
    log: bool = False
    join_seeds: bool = True
    interval: bool = False
    """The band of several seeds is the 95 % interval of their mean, and not their range."""
    published: bool = True


@dataclass(frozen=True)
class _PlottedRun(PlottedRun):
    points: Floats
    name: str = ""
    """Set if the run is a curve of its own."""

    @property
    def setting(self) -> dict[str, Any]:
        found = super().setting
        return {**found, "run": self.name} if self.name else found


def panels(runs: Sequence[Run], metric: str, options: CurveOptions) -> list[Panel]:
    """A panel for each task of the runs that have logged a metric."""
    plotted = []
    for run in runs:
        if run.config is None or (points := _at_axis(run, metric, options.axis)) is None:
            continue
        scores = Scores(points[:, 0], points[:, 1])
        name = "" if options.join_seeds else run.name
        plotted.append(_PlottedRun(replace(run.config, logdir=run.path), scores, points, name))
    return panels_of(plotted, _BINS, interval=options.interval)


def _at_axis(run: Run, metric: str, axis: Axis) -> Floats | None:
    """The points of a metric in order of the x axis; None if they cannot be placed there."""
    points = run.points(metric)
    if points is None or not len(points) or run.config is None:
        return None
    points = points.copy()
    if axis == "hours":
        with run.lock:
            hours = run.scores.hours
        if hours is None:
            return None
        order = np.argsort(hours[:, 0], kind="stable")
        over = hours[:, 1] if metric == SCORE else np.interp(points[:, 0], *hours[order].T)
        points[:, 0] = over
    elif axis == "frames":
        points[:, 0] *= action_repeat(run.config)
    found: Floats = points[np.argsort(points[:, 0], kind="stable")]
    return found


def missing_hours(runs: Sequence[Run], options: CurveOptions) -> str:
    """Why runs are missing on the axis of hours."""
    names = [run.name for run in runs if run.scores.rows and run.scores.hours is None]
    if options.axis != "hours" or not names:
        return ""
    return f"Not drawn over hours, because their episodes have no time: {', '.join(names)}."


def smoothed(values: Floats, weight: float) -> Floats:
    """An exponential mean without bias towards zero at its start."""
    if not weight:
        return values
    result, mean, total = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        result[index] = mean / total
    return result


def _curve(group: Group, metric: str, options: CurveOptions) -> Curve:
    """The curve of a group. A single run keeps more points, and the range of joined rows."""
    curve, run = group.curve, group.runs[0]
    if len(group.runs) == 1 and metric != SCORE and isinstance(run, _PlottedRun):
        at, mean, low, high = thinned(run.points, _METRIC_POINTS).T
        curve = Curve(at, mean, low, high, np.ones(len(at), np.int64), 1)
    edges = (curve.mean, curve.low, curve.high)
    mean, low, high = (smoothed(each, options.smoothing) for each in edges)
    return replace(curve, mean=mean, low=low, high=high)


def to_csv(found: Sequence[tuple[str, Panel]], options: CurveOptions) -> str:
    """The curves of metrics as they are drawn, a line per point."""
    out = io.StringIO()
    writer = csv.writer(out)
    columns = ["task", "setting", "seeds", options.axis, "mean", "low", "high", "runs"]
    writer.writerow(["metric", *columns])
    for metric, panel in found:
        for group in panel.groups:
            curve = _curve(group, metric, options)
            about = [_csv_text(metric), _csv_text(panel.task), _csv_text(group.label), group.seeds]
            values = (curve.at, curve.mean, curve.low, curve.high, curve.present)
            writer.writerows([*about, *point] for point in zip(*values, strict=True))
    return out.getvalue()


def _csv_text(text: str) -> str:
    """Text that a spreadsheet does not evaluate as a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


def panel_chart(panel: Panel, metric: str, options: CurveOptions) -> Chart:
    """The curves of one metric and one task; of a single run also its episodes as dots."""
    chart = Chart(options.axis, log=options.log)
    first = panel.groups[0].runs[0]
    alone = len(panel.groups) == len(panel.groups[0].runs) == 1
    if metric == SCORE and alone and isinstance(first, _PlottedRun):
        chart.dots("episodes", thinned(first.points, _MAX_DOTS))
    if metric in (SCORE, EVALUATION) and options.published and options.axis != "hours":
        _add_published(chart, panel, action_repeat(first.config) if options.axis == "steps" else 1)
    for number, group in enumerate(panel.groups):
        color, curve = COLORS[number % len(COLORS)], _curve(group, metric, options)
        label = group.label if curve.runs == 1 else f"{group.label} · {group.size}"
        if (curve.high > curve.low).any():
            chart.band(curve.at, curve.low, curve.high, color)
        chart.line(label, curve.at, np.where(curve.whole, curve.mean, np.nan), color, z=3)
        if not curve.whole.all():  # dotted, with the number of runs, where some have no value
            mean = np.where(curve.partial, curve.mean, np.nan)
            dotted = chart.line(label, curve.at, mean, color, z=3, lineStyle={"type": "dotted"})
            for point, present in zip(dotted["data"], curve.present.tolist(), strict=True):
                point.append(f"{present} of {curve.runs} runs")
    return chart


def _add_published(chart: Chart, panel: Panel, repeat: int) -> None:
    """Add the published curve, if there is one, over the steps of which each has so many frames."""
    if (published := panel.published) is None:
        return
    own = published.frames / repeat
    shown = max((group.curve.at for group in panel.groups), key=len)
    after = own[(own > shown[-1]) & (own <= max(shown[-1] * 1.25, own[1]))]
    # A point wherever the curves have one, so that a tooltip shows both values.
    x = np.concatenate([shown[(shown >= own[0]) & (shown <= own[-1])], after])
    mean, std = (np.interp(x, own, y) for y in (published.mean, published.std))
    chart.band(x, mean - std, mean + std, GREY)
    style = {"type": "dashed", "width": 1.5}
    chart.line(f"published · {published.seeds} seeds", x, mean, GREY, lineStyle=style, z=2)


def add_diamonds(chart: Chart, run: Run, options: CurveOptions) -> None:
    """Add the evaluations of a run to a chart of its scores."""
    if (found := _at_axis(run, EVALUATION, options.axis)) is not None:
        style = {"symbol": "diamond", "symbolSize": 11, "z": 5, "silent": False}
        color = {"itemStyle": {"color": COLORS[1]}, "tooltip": {"trigger": "item"}}
        chart.dots("evaluation", found, **style, **color)


class Chart:
    """The options of a chart with curves. Only curves with a name are in its legend."""

    def __init__(self, x_name: str = "", *, log: bool = False, tools: bool = True) -> None:
        self._log = log
        self.series: list[dict[str, Any]] = []
        label = {"color": GREY, ":formatter": "v => dreamfleet.short(v, 3)", "hideOverlap": True}
        axis: dict[str, Any] = {
            "axisLine": {"lineStyle": {"color": _FAINT}},
            "axisTick": {"show": False},
            "splitLine": {"lineStyle": {"color": _FAINT}},
            "axisLabel": label,
            "nameTextStyle": {"color": GREY},
        }
        # A longer name would overlap the tools.
        text = {"color": GREY, ":width": "innerWidth < 700 ? 110 : 320", "overflow": "truncate"}
        legend = {"type": "scroll", "left": 0, "top": 3, "icon": "roundRect", "textStyle": text}
        legend |= {"itemWidth": 14, "itemHeight": 4}
        legend |= {"width": "62%"} if tools else {"right": 0}
        self.options: dict[str, Any] = {
            "animation": False,
            "textStyle": {"fontFamily": "inherit"},
            "grid": {"left": 8, "right": 18, "top": 34, "bottom": 30, "containLabel": True},
            "legend": legend,
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "transitionDuration": 0,
                ":formatter": "items => dreamfleet.tip(items)",
                "backgroundColor": "rgba(24,31,41,.94)",
                "borderWidth": 0,
                "textStyle": {"color": "#e8edf4", "fontSize": 13},
            },
            "xAxis": {
                **axis,
                "type": "value",
                "name": x_name,
                "nameLocation": "middle",
                "nameGap": 26,
                "splitLine": {"show": False},
                "axisLabel": {**label, "showMaxLabel": False},
                "min": 0,
                "max": "dataMax",
            },
            "yAxis": {**axis, "type": "log" if log else "value", "scale": True},
            "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl"}],
            "series": self.series,
        }
        if tools:
            feature = {
                "dataZoom": {"title": {"zoom": "zoom", "back": "back"}, "filterMode": "none"},
                "restore": {"title": "reset"},
                "saveAsImage": {"title": "PNG", "name": "dreamfleet", "pixelRatio": 2},
            }
            place = {"right": 6, "top": -4, "itemSize": 14, "iconStyle": {"borderColor": GREY}}
            self.options["toolbox"] = {**place, "feature": feature}

    def line(self, name: str, x: Floats, y: Floats, color: str, **more: Any) -> dict[str, Any]:
        """A curve; a logarithmic axis and NaN leave gaps."""
        series = {
            "type": "line",
            "showSymbol": len(x) == 1,
            "symbolSize": 5,
            "color": color,
            "data": self._pairs(x, y),
            "emphasis": {"disabled": True},
            **({"name": name} if name else {}),
            **more,
            "lineStyle": {"color": color, "width": 2, **more.get("lineStyle", {})},
        }
        self.series.append(series)
        return series

    def dots(self, name: str, points: Floats, **more: Any) -> None:
        """Points behind the curves, without a tooltip."""
        series = {
            "type": "scatter",
            "name": name,
            "data": self._pairs(points[:, 0], points[:, 1]),
            "symbolSize": 3,
            "itemStyle": {"color": COLORS[0], "opacity": 0.35},
            "emphasis": {"disabled": True},
            "silent": True,
            "tooltip": {"show": False},
        }
        self.series.append(series | more)

    def band(self, x: Floats, low: Floats, high: Floats, color: str) -> None:
        """The area between two curves: an invisible lower one, and the rest stacked on it. A
        logarithmic axis cannot stack, so there the edges are drawn."""
        style: dict[str, Any] = {"silent": True, "z": 1, "lineStyle": {"width": 1, "opacity": 0.35}}
        if not self._log:
            style |= {"stack": f"band-{len(self.series)}", "stackStrategy": "all"}
            style["lineStyle"] = {"width": 0, "opacity": 0}
        self.line("", x, low, color, **style)
        area = {} if self._log else {"areaStyle": {"color": color, "opacity": 0.16}}
        self.line("", x, high if self._log else high - low, color, **style, **area)

    def _pairs(self, x: Floats, y: Floats) -> list[list[Any]]:
        drawn = np.isfinite(y) & ((y > 0) if self._log else True)
        return [
            [_rounded(at), _rounded(value) if shown else None]
            for at, value, shown in zip(x.tolist(), y.tolist(), drawn.tolist(), strict=True)
        ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
