"""Any metric of any runs as curves, and the options of all charts.

Groups are those of `dreamfleet plot`: runs that differ only in their seed are one curve.

The library runs options whose key starts with a colon as JavaScript. So no key comes from a run.
All colours work on light and dark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from dreamfleet.plotting import (
    Curve,
    Group,
    Panel,
    PlottedRun,
    PublishedCurve,
    Scores,
    action_repeat,
    panels_of,
)
from dreamfleet.view.reading import Floats, thinned
from dreamfleet.view.runs import EVALUATION, SCORE, Run

Axis = Literal["steps", "frames", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)
COLORS = ("#2b87d1", "#d95568", "#3a9d68", "#9a73cc", "#c9922a", "#4fa3ae")
GREY = "#8792a2"
_FAINT = "rgba(128,140,156,.16)"
_SCORE_BINS, _METRIC_POINTS, _MAX_DOTS = 60, 500, 400


@dataclass(frozen=True)
class CurveOptions:
    """How curves are drawn."""

    axis: Axis = "steps"
    smoothing: float = 0.0
    """Weight of the previous point, from 0 to below 1."""
    log: bool = False
    join_seeds: bool = True
    published: bool = True


@dataclass(frozen=True)
class _PlottedRun(PlottedRun):
    name: str = ""
    points: Floats = field(default_factory=lambda: np.zeros((0, 4)))
    separate: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        found = super().setting
        return {**found, "run": self.name} if self.separate else found


def panels(
    runs: Sequence[Run], metric: str, options: CurveOptions, bins: int = _SCORE_BINS
) -> list[Panel]:
    """A panel for each task of the runs that have logged a metric."""
    plotted = []
    for run in runs:
        if run.config is None or (points := _at_axis(run, metric, options.axis)) is None:
            continue
        config = replace(run.config, logdir=run.path)
        scores = Scores(points[:, 0], points[:, 1])
        plotted.append(_PlottedRun(config, scores, run.name, points, not options.join_seeds))
    return panels_of(plotted, bins)


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
        if metric == SCORE:
            points[:, 0] = hours[:, 1]
        else:
            order = np.argsort(hours[:, 0], kind="stable")
            points[:, 0] = np.interp(points[:, 0], *hours[order].T)
    elif axis == "frames":
        points[:, 0] *= action_repeat(run.config)
    found: Floats = points[np.argsort(points[:, 0], kind="stable")]
    return found


def missing_hours(runs: Sequence[Run], options: CurveOptions) -> str:
    """Why runs are missing on the axis of hours."""
    if options.axis != "hours":
        return ""
    names = [run.name for run in runs if run.scores.rows and run.scores.hours is None]
    return f"Not drawn over hours, because episodes lack a time: {', '.join(names)}." * bool(names)


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


def _curve(group: Group, metric: str, weight: float) -> Curve:
    """The curve of a group. A single run keeps more points, and the range of joined rows."""
    curve = group.curve
    run = group.runs[0]
    if len(group.runs) == 1 and metric not in (SCORE, EVALUATION) and isinstance(run, _PlottedRun):
        at, mean, low, high = thinned(run.points, _METRIC_POINTS).T
        curve = Curve(at, mean, low, high, np.ones(len(at), np.int64), 1)
    elif metric == EVALUATION and len(group.runs) == 1:
        at, mean = run.scores.at, run.scores.score
        curve = Curve(at, mean, mean, mean, np.ones(len(at), np.int64), 1)
    mean, low, high = (smoothed(each, weight) for each in (curve.mean, curve.low, curve.high))
    return replace(curve, mean=mean, low=low, high=high)


def to_csv(found: Sequence[tuple[str, Panel]], options: CurveOptions) -> str:
    """The curves of metrics as they are drawn, a line per point."""
    out = io.StringIO()
    writer = csv.writer(out)
    columns = ["task", "setting", "seeds", options.axis, "mean", "low", "high", "runs"]
    writer.writerow(["metric", *columns])
    for metric, panel in found:
        for group in panel.groups:
            curve = _curve(group, metric, options.smoothing)
            about = [_csv_text(metric), _csv_text(panel.task), _csv_text(group.label), group.seeds]
            values = (curve.at, curve.mean, curve.low, curve.high, curve.present)
            writer.writerows([*about, *point] for point in zip(*values, strict=True))
    return out.getvalue()


def _csv_text(text: str) -> str:
    """Text that a spreadsheet does not evaluate as a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


def panel_chart(panel: Panel, metric: str, options: CurveOptions) -> dict[str, Any]:
    """The curves of one metric and one task; of a single run also its episodes as dots."""
    chart = base(options.axis, log=options.log)
    names: list[str] = []
    series: list[dict[str, Any]] = []
    if metric == SCORE and len(panel.groups) == len(panel.groups[0].runs) == 1:
        scores = panel.groups[0].runs[0].scores
        points = thinned(np.stack([scores.at, scores.score], 1), _MAX_DOTS)
        series.append(dots("episodes", points[:, 0], points[:, 1], log=options.log))
    published = panel.published if metric in (SCORE, EVALUATION) and options.published else None
    if published is not None and options.axis != "hours":  # it is over frames
        frames = action_repeat(panel.groups[0].runs[0].config) if options.axis == "steps" else 1
        longest = max((group.curve.at for group in panel.groups), key=len)
        series += _published(published, frames, longest, options.log)
        names.append(series[-1]["name"])
    for number, group in enumerate(panel.groups):
        color, curve = COLORS[number % len(COLORS)], _curve(group, metric, options.smoothing)
        label = group.label if curve.runs == 1 else f"{group.label} · {group.size}"
        if (curve.high > curve.low).any():
            series += band(number, curve.at, curve.low, curve.high, color, log=options.log)
        series += _mean(label, curve, color, options.log)
        names.append(label)
    chart["series"], chart["legend"]["data"] = series, names
    return chart


def _mean(label: str, curve: Curve, color: str, log: bool) -> list[dict[str, Any]]:
    """The mean; dotted, with the number of runs, where some runs have no value."""
    lines = [line(label, curve.at, np.where(curve.whole, curve.mean, np.nan), color, log=log, z=3)]
    if not curve.whole.all():
        mean = np.where(curve.partial, curve.mean, np.nan)
        dotted = line(label, curve.at, mean, color, log=log, z=3, lineStyle={"type": "dotted"})
        for point, present in zip(dotted["data"], curve.present.tolist(), strict=True):
            point.append(f"{present} of {curve.runs} runs")
        lines.append(dotted)
    return lines


def _published(
    theirs: PublishedCurve, repeat: int, shown: Floats, log: bool
) -> list[dict[str, Any]]:
    """With a point wherever the curves have one, so that a tooltip shows both values."""
    own = theirs.frames / repeat
    after = own[(own > shown[-1]) & (own <= max(shown[-1] * 1.25, own[1]))]
    x = np.concatenate([shown[(shown >= own[0]) & (shown <= own[-1])], after])
    mean, std = (np.interp(x, own, y) for y in (theirs.mean, theirs.std))
    style = {"type": "dashed", "width": 1.5}
    name = f"published · {theirs.seeds} seeds"
    return [
        *band(1000, x, mean - std, mean + std, GREY, log=log),
        line(name, x, mean, GREY, log=log, lineStyle=style, z=2),
    ]


def metrics_chart(curves: Sequence[tuple[str, Floats]], *, log: bool = False) -> dict[str, Any]:
    """Several metrics of one run in a small chart."""
    chart = base("steps", log=log, tools=False)
    chart["series"] = [
        line(name, points[:, 0], points[:, 1], COLORS[number % len(COLORS)], log=log)
        for number, (name, points) in enumerate(curves)
    ]
    chart["legend"]["data"] = [name for name, _ in curves]
    return chart


def base(x_name: str = "", *, log: bool = False, tools: bool = True) -> dict[str, Any]:
    """A chart without curves."""
    axis: dict[str, Any] = {
        "axisLine": {"lineStyle": {"color": _FAINT}},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": _FAINT}},
        "axisLabel": {"color": GREY, ":formatter": "v => dreamfleet.short(v, 3)"},
        "nameTextStyle": {"color": GREY},
    }
    axis["axisLabel"]["hideOverlap"] = True
    legend = {"type": "scroll", "left": 0, "top": 3, "icon": "roundRect", "data": []}
    legend |= {"itemWidth": 14, "itemHeight": 4}
    legend |= {"width": "62%"} if tools else {"right": 0}
    # A longer name would overlap the tools.
    width = "innerWidth < 700 ? 110 : 320"
    legend["textStyle"] = {"color": GREY, ":width": width, "overflow": "truncate"}
    options: dict[str, Any] = {
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
            "axisLabel": {**axis["axisLabel"], "showMaxLabel": False},
            "min": 0,
            "max": "dataMax",
        },
        "yAxis": {**axis, "type": "log" if log else "value", "scale": True},
        "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl"}],
        "series": [],
    }
    if tools:
        feature = {
            "dataZoom": {"title": {"zoom": "zoom", "back": "back"}, "filterMode": "none"},
            "restore": {"title": "reset"},
            "saveAsImage": {"title": "PNG", "name": "dreamfleet", "pixelRatio": 2},
        }
        style = {"borderColor": GREY}
        options["toolbox"] = {"right": 6, "top": -4, "itemSize": 14, "iconStyle": style}
        options["toolbox"]["feature"] = feature
    return options


def line(
    name: str, x: Floats, y: Floats, color: str, *, log: bool = False, **more: Any
) -> dict[str, Any]:
    """A curve."""
    return {
        "type": "line",
        "name": name,
        "showSymbol": len(x) == 1,
        "symbolSize": 5,
        "color": color,
        "data": pairs(x, y, log=log),
        "emphasis": {"disabled": True},
        **more,
        "lineStyle": {"color": color, "width": 2, **more.get("lineStyle", {})},
    }


def add_diamonds(chart: dict[str, Any], run: Run, options: CurveOptions) -> float | None:
    """Add the evaluations of a run to a chart of its scores; returns the newest mean."""
    found = _at_axis(run, EVALUATION, options.axis)
    if found is None:
        return None
    series = dots("evaluation", found[:, 0], found[:, 1], log=options.log)
    series |= {"symbol": "diamond", "symbolSize": 11, "z": 5, "silent": False}
    series |= {"itemStyle": {"color": COLORS[1]}, "tooltip": {"trigger": "item"}}
    chart["series"].append(series)
    return float(found[-1, 1])


def dots(name: str, x: Floats, y: Floats, *, log: bool = False) -> dict[str, Any]:
    """Points behind the curves, without a tooltip."""
    return {
        "type": "scatter",
        "name": name,
        "data": pairs(x, y, log=log),
        "symbolSize": 3,
        "itemStyle": {"color": COLORS[0], "opacity": 0.35},
        "emphasis": {"disabled": True},
        "silent": True,
        "tooltip": {"show": False},
    }


def band(
    number: int, x: Floats, low: Floats, high: Floats, color: str, *, log: bool = False
) -> list[dict[str, Any]]:
    """The area between two curves: an invisible lower one, and the rest stacked on it. A
    logarithmic axis cannot stack, so there the edges are drawn."""
    common: dict[str, Any] = {"silent": True, "z": 1}
    if log:
        common["lineStyle"] = {"width": 1, "opacity": 0.35}
        edges = ((f".{number}low", low), (f".{number}high", high))
        return [line(name, x, y, color, log=True, **common) for name, y in edges]
    common |= {"stack": f"band-{number}", "stackStrategy": "all"}
    common["lineStyle"] = {"width": 0, "opacity": 0}
    area = {"color": color, "opacity": 0.16}
    return [
        line(f".{number}low", x, low, color, **common),
        line(f".{number}high", x, high - low, color, areaStyle=area, **common),
    ]


def pairs(x: Floats, y: Floats, *, log: bool = False) -> list[list[Any]]:
    """Points of a chart; values that cannot be drawn are gaps."""
    drawn = np.isfinite(y) & ((y > 0) if log else True)
    return [
        [_rounded(at), _rounded(value) if shown else None]
        for at, value, shown in zip(x.tolist(), y.tolist(), drawn.tolist(), strict=True)
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
