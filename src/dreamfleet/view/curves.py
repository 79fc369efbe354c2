"""Scores of runs that were chosen, as curves of a chart.

The groups are those of `dreamfleet plot`: runs that differ in nothing but their seed are one curve.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from dreamfleet.errors import MetricsError
from dreamfleet.metrics.curves import Curve, Scores, read_evaluations
from dreamfleet.plotting import Panel, action_repeat, panels_of
from dreamfleet.plotting import Run as PlottedRun
from dreamfleet.view.reading import Floats
from dreamfleet.view.runs import Run

Axis = Literal["steps", "frames", "hours"]
AXES: tuple[Axis, ...] = get_args(Axis)
_LONGEST_PAUSE = 900.0
"""Seconds without an episode after which a run was not under way, or as good as that."""


@dataclass(frozen=True)
class Wish:
    """How curves are drawn."""

    axis: Axis = "steps"
    smoothing: float = 0.0
    """From 0 to below 1: the weight of the point before."""
    together: bool = True
    """Whether seeds of one setting are one curve."""
    evaluations: bool = False
    bins: int = 60


def panels(runs: Sequence[Run], wish: Wish) -> list[Panel]:
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


def _scores(run: Run, axis: Axis) -> Scores | None:
    with run.lock:
        step, score, time = run.scores.step, run.scores.score, run.scores.time
    if axis == "hours":
        there = np.isfinite(time)
        return Scores(training_hours(time[there]), score[there])
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


def training_hours(time: Floats) -> Floats:
    """Hours since the first of these Unix times, without long pauses: a run that was resumed a week
    later has not trained for a week."""
    if not len(time):
        return time
    gaps = np.clip(np.diff(time), 0, None)
    gaps[gaps > max(_LONGEST_PAUSE, 20 * float(np.median(gaps)) if len(gaps) else 0.0)] = 0.0
    return np.concatenate([[0.0], np.cumsum(gaps)]) / 3600


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


def to_csv(found: Sequence[Panel], wish: Wish) -> str:
    """The curves as they are drawn, a line a point."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["task", "setting", "seeds", wish.axis, "mean", "low", "high"])
    for panel in found:
        for group in panel.groups:
            curve = smooth(group.curve, wish.smoothing)
            for at, mean, low, high in zip(
                curve.at, curve.mean, curve.low, curve.high, strict=True
            ):
                row = [_cell(panel.task), _cell(group.label), curve.runs, at, mean, low, high]
                writer.writerow(row)
    return out.getvalue()


def _cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
