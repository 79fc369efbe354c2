"""Scores of runs that were chosen, as curves, and the options of all charts.

The groups are those of `dreamfleet plot`: runs that differ in nothing but their seed are one curve.

The library runs options whose key starts with a colon as JavaScript, so keys are never taken from
runs, and what is run here is fixed. All colours do on light and on dark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from dreamfleet.errors import MetricsError
from dreamfleet.plotting import (
    Curve,
    Panel,
    PlottedRun,
    PublishedCurve,
    Scores,
    action_repeat,
    panels_of,
    read_evaluations,
)
from dreamfleet.view.reading import Floats
from dreamfleet.view.runs import Run

Axis = Literal["steps", "frames", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True)
class CurveOptions:
    """How curves are drawn."""

    axis: Axis = "steps"
    smoothing: float = 0.0
    """From 0 to below 1: the weight of the point before."""
    together: bool = True
    """Whether seeds of one setting are one curve."""
    evaluations: bool = False
    bins: int = 60


def panels(runs: Sequence[Run], wish: CurveOptions) -> list[Panel]:
    """A panel for each task of the runs that have scores."""
    plotted = []
    for run in runs:
        if run.config is None:
            continue
        scores = _evaluations(run, wish.axis) if wish.evaluations else _scores(run, wish.axis)
        if scores is not None and len(scores):
            config = replace(run.config, logdir=run.path)
            plotted.append(_Alone(config, scores, run.name, not wish.together))
    return panels_of(plotted, wish.bins)


@dataclass(frozen=True)
class _Alone(PlottedRun):
    """A run with its name, which is a group of its own if that is wanted."""

    name: str = ""
    alone: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        found = super().setting
        return {**found, "run": self.name} if self.alone else found


def undrawn(runs: Sequence[Run], wish: CurveOptions) -> str:
    """Which of the runs that have scores are missing in the curves, and why."""
    if wish.axis != "hours":
        return ""
    if wish.evaluations:
        return "Evaluations do not say when they were played: choose steps or frames."
    names = [run.name for run in runs if len(run.scores) and run.scores.hours is None]
    if not names:
        return ""
    return f"Not over hours, because not every episode says when it ended: {', '.join(names)}."


def _scores(run: Run, axis: Axis) -> Scores | None:
    with run.lock:
        step, score = run.scores.step, run.scores.score
        hours = run.scores.hours if axis == "hours" else None
    if axis == "hours":
        return None if hours is None else Scores(hours, score)
    assert run.config is not None
    order = np.argsort(step, kind="stable")
    factor = action_repeat(run.config) if axis == "frames" else 1
    return Scores(step[order] * factor, score[order])


def _evaluations(run: Run, axis: Axis) -> Scores | None:
    if axis == "hours":  # when they were played is not written down
        return None
    assert run.config is not None
    try:
        factor = action_repeat(run.config) if axis == "frames" else 1
        return read_evaluations(run.path, factor)
    except (MetricsError, OSError, ValueError, TypeError):
        return None


def smoothed(values: Floats, weight: float) -> Floats:
    """An exponential mean, without the pull towards zero at its start."""
    if not weight:
        return values
    result, mean, total = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        result[index] = mean / total
    return result


def smooth(curve: Curve, weight: float) -> Curve:
    """The same of a curve and its range."""
    mean, low, high = (smoothed(each, weight) for each in (curve.mean, curve.low, curve.high))
    return replace(curve, mean=mean, low=low, high=high)


def to_csv(found: Sequence[Panel], wish: CurveOptions) -> str:
    """The curves as they are drawn, a line a point."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["task", "setting", "seeds", wish.axis, "mean", "low", "high", "runs"])
    for panel in found:
        for group in panel.groups:
            curve = smooth(group.curve, wish.smoothing)
            about = [_cell(panel.task), _cell(group.label), group.seeds]
            columns = (curve.at, curve.mean, curve.low, curve.high, curve.present)
            writer.writerows([*about, *point] for point in zip(*columns, strict=True))
    return out.getvalue()


def _cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


COLORS = ("#2b87d1", "#d95568", "#3a9d68", "#9a73cc", "#c9922a", "#4fa3ae")
_GREY = "#8792a2"
_FAINT = "rgba(128,140,156,.16)"


def base(x_name: str = "", *, log: bool = False, tools: bool = True) -> dict[str, Any]:
    """A chart without curves."""
    axis: dict[str, Any] = {
        "axisLine": {"lineStyle": {"color": _FAINT}},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": _FAINT}},
        "axisLabel": {
            "color": _GREY,
            ":formatter": "v => dreamfleet.short(v, 3)",
            "hideOverlap": True,
        },
        "nameTextStyle": {"color": _GREY},
    }
    options: dict[str, Any] = {
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 8, "right": 18, "top": 34, "bottom": 30, "containLabel": True},
        "legend": {
            "type": "scroll",
            "left": 0,
            **({"width": "62%"} if tools else {"right": 0}),
            "top": 3,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 4,
            # A long name would push what turns its pages over the tools.
            "textStyle": {
                "color": _GREY,
                ":width": "innerWidth < 700 ? 110 : 320",
                "overflow": "truncate",
            },
            "data": [],
        },
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
        options["toolbox"] = {
            "right": 6,
            "top": -4,
            "itemSize": 14,
            "iconStyle": {"borderColor": _GREY},
            "feature": {
                "dataZoom": {"title": {"zoom": "zoom", "back": "back"}, "filterMode": "none"},
                "restore": {"title": "whole"},
                "saveAsImage": {"title": "PNG", "name": "dreamfleet", "pixelRatio": 2},
            },
        }
    return options


def line(
    name: str, x: Floats, y: Floats, color: str, *, log: bool = False, **more: Any
) -> dict[str, Any]:
    """A curve."""
    style = {"color": color, "width": 2, **more.pop("lineStyle", {})}
    return {
        "type": "line",
        "name": name,
        "showSymbol": len(x) == 1,
        "symbolSize": 5,
        "color": color,
        "lineStyle": style,
        "data": pairs(x, y, log=log),
        "emphasis": {"disabled": True},
        **more,
    }


def band(
    number: int, x: Floats, low: Floats, high: Floats, color: str, *, log: bool = False
) -> list[dict[str, Any]]:
    """What lies between two curves: the lower one unseen, and the rest stacked on it. On a
    logarithmic axis nothing can be stacked, so its edges are drawn."""
    thin: dict[str, Any] = {"silent": True, "z": 1}
    if log:
        faint = {"width": 1, "opacity": 0.35}
        return [
            line(f".{number}{edge}", x, y, color, log=True, lineStyle=faint, **thin)
            for edge, y in (("low", low), ("high", high))
        ]
    unseen = {"width": 0, "opacity": 0}
    stack: dict[str, Any] = {"stack": f"band-{number}", "stackStrategy": "all", **thin}
    return [
        line(f".{number}low", x, low, color, lineStyle=unseen, **stack),
        line(
            f".{number}high",
            x,
            high - low,
            color,
            lineStyle=unseen,
            areaStyle={"color": color, "opacity": 0.16},
            **stack,
        ),
    ]


def pairs(x: Floats, y: Floats, *, log: bool = False) -> list[list[float | None]]:
    """Points as a chart takes them; values that cannot be drawn are gaps."""
    shown = np.isfinite(y) & ((y > 0) if log else True)
    return [
        [_digits(at), _digits(value) if there else None]
        for at, value, there in zip(x.tolist(), y.tolist(), shown.tolist(), strict=True)
    ]


def _digits(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)


def panel_chart(panel: Panel, wish: CurveOptions, *, published: bool, log: bool) -> dict[str, Any]:
    """The curves of one task."""
    options = base(wish.axis, log=log)
    series: list[dict[str, Any]] = []
    names: list[str] = []
    if published and panel.published and wish.axis != "hours":
        # They are published over frames.
        repeat = action_repeat(panel.groups[0].runs[0].config) if wish.axis == "steps" else 1
        longest = max((group.curve.at for group in panel.groups), key=len)
        series += _published(panel.published, repeat, longest, log)
        names.append(series[-1]["name"])
    for number, group in enumerate(panel.groups):
        color, curve = COLORS[number % len(COLORS)], smooth(group.curve, wish.smoothing)
        label = group.label if curve.runs == 1 else f"{group.label} · {group.size}"
        if curve.runs > 1:
            series += band(number, curve.at, curve.low, curve.high, color, log=log)
        series += _mean(label, curve, color, log)
        names.append(label)
    options["series"] = series
    options["legend"]["data"] = names
    return options


def _mean(label: str, curve: Curve, color: str, log: bool) -> list[dict[str, Any]]:
    """The mean; where it is not that of all runs it is dotted, and says of how many."""
    whole = np.where(curve.whole, curve.mean, np.nan)
    lines = [line(label, curve.at, whole, color, log=log, z=3)]
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
    """With a point wherever the curves have one, so that a place shows the values of both."""
    own = theirs.frames / repeat
    after = own[(own > shown[-1]) & (own <= max(shown[-1] * 1.25, own[1]))]
    x = np.concatenate([shown[(shown >= own[0]) & (shown <= own[-1])], after])
    mean, std = (np.interp(x, own, y) for y in (theirs.mean, theirs.std))
    dashed = {"type": "dashed", "width": 1.5}
    name = f"published · {theirs.seeds} seeds"
    return [
        *band(1000, x, mean - std, mean + std, _GREY, log=log),
        line(name, x, mean, _GREY, log=log, lineStyle=dashed, z=2),
    ]


def curves_chart(
    curves: Sequence[tuple[str, Floats]], *, log: bool = False, tools: bool = True
) -> dict[str, Any]:
    """Thinned columns in one chart; a single one with its range where rows were joined."""
    options = base("steps", log=log, tools=tools)
    for number, (name, points) in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        if len(points) and len(curves) == 1 and (points[:, 3] > points[:, 2]).any():
            low, high = points[:, 2], points[:, 3]
            options["series"] += band(number, points[:, 0], low, high, color, log=log)
        options["series"].append(line(name, points[:, 0], points[:, 1], color, log=log))
        options["legend"]["data"].append(name)
    return options


def prediction_chart(name: str, truth: Floats, predicted: Floats, observed: int) -> dict[str, Any]:
    """Truth and prediction of one value; a line marks the last step that was observed."""
    options = base(tools=False)
    start = observed - 1
    at = np.arange(len(truth), dtype=np.float64)
    after = start + np.arange(len(predicted), dtype=np.float64)
    mark = {
        "silent": True,
        "symbol": "none",
        "label": {"show": False},
        "lineStyle": {"color": _GREY, "type": "dotted"},
        "data": [{"xAxis": start}],
    }
    options["series"] = [
        line("truth", at, truth, _GREY, markLine=mark),
        line("prediction", after, predicted, COLORS[0]),
    ]
    options["title"] = {"text": name, "textStyle": {"color": _GREY, "fontSize": 13}}
    return options
