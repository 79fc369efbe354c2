"""A run: how far it is, its scores, and the curves that matter most."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import numpy as np
from nicegui import ui

from dreamfleet.fleet.status import RunStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.view.acts import add_acts
from dreamfleet.view.charts import (
    AXES,
    COLORS,
    CurveOptions,
    curves_chart,
    pairs,
    panel_chart,
    panels,
    undrawn,
)
from dreamfleet.view.frame import RunPage, card, draw
from dreamfleet.view.reading import thinned
from dreamfleet.view.runs import Run

_DRAW_SECONDS = 5.0  # drawing is most of what an open page costs
_DOTS = 400
_POINTS = 250


class _Chart(NamedTuple):
    title: str
    note: str
    pattern: str
    """Of the metrics in it."""
    log: bool = False


_CHARTS = (
    _Chart("World model", "losses", r"train/loss/(reconstruction/.+|reward|continue|mask)", True),
    _Chart("Latent state", "KL divergence, nats", r"train/loss/(dynamics|representation)"),
    _Chart("Actor and critic", "imagined", r"train/(value|target|slow_value)"),
    _Chart("Exploration", "0 deterministic, 1 uniform", r"train/randomness/.+"),
    _Chart("Gradient", "norm before clipping", r"train/(opt/grad_norm|gradient_norm/.+)", True),
    _Chart("Speed", "a second", r"(actor(-\d+)?/steps|learner/updates)_per_second"),
    _Chart("Replay ratio", "replayed steps a step", r"learner/replay_ratio"),
    _Chart("Policy age", "updates behind the learner", r"actor(-\d+)?/policy/updates_behind"),
)


class OverviewPage(RunPage):
    """How far the run is, its scores, and curves."""

    path, seconds = "run", 1.0

    def build(self) -> None:
        self._draw_at = 0.0
        self._drawn_scores: object = None
        self._drawn_metrics: object = None
        self._charts: dict[str, ui.echart] = {}
        self._evaluation: float | None = None
        with card():
            self._add_head()
        with card("Score", "training episodes; diamonds are evaluations"):
            with ui.element("div").classes("row-of wishes"):
                self._axis = ui.toggle(list(AXES), value="steps", on_change=self._draw_scores)
                self._axis.props("dense no-caps unelevated")
                self._log = ui.switch("log", on_change=self._draw_scores).props("dense")
            self._score_place = ui.element("div")
            self._no_score = ui.label().classes("muted")
        self._grid = ui.element("div").classes("grid")

    def _add_head(self) -> None:
        with ui.element("div").classes("row-of"):
            with ui.element("div"):
                self._dot = ui.element("span").classes("dot")
                self._state = ui.label().classes("strong state")
            self._about = ui.label().classes("muted")
            ui.element("div").classes("space")
            add_acts(self._run)
        with ui.element("div").classes("progress"):
            with ui.element("div").classes("bar"):
                self._bar = ui.element("div")
            self._progress = ui.label().classes("small muted")
        self._message = ui.label().classes("message")
        self._numbers = ui.element("div").classes("numbers")
        self._values: dict[str, ui.label] = {}

    def refresh(self) -> None:
        self._show_head()
        due = time.monotonic() >= self._draw_at
        if due or "score" not in self._charts:
            self._draw_scores()
        if due or len(self._charts) < 2:
            self._draw_metrics()
        if due:
            self._draw_at = time.monotonic() + _DRAW_SECONDS

    def _show_head(self) -> None:
        row, status = self._run.row, self._run.status
        if self._state.text != row.state:
            self._dot.classes(replace=f"dot {row.state}")
            self._state.text = row.state
        self._about.text = " · ".join(
            filter(None, [row.task, row.preset, f"seed {row.seed}", row.machine])
        )
        share = status.share if status else None
        width = f"width: {100 * share:.1f}%" if share is not None else "width: 0"
        if self._bar.props.get("style") != width:
            self._bar.props["style"] = width
        self._progress.text = progress_words(row.step, row.steps, status)
        self._message.text = row.problem or (status.message if status else "")
        self._message.set_visibility(bool(self._message.text))
        for name, value in _numbers(self._run, status, self._evaluation).items():
            if name not in self._values:
                with self._numbers, ui.element("div").classes("number"):
                    self._values[name] = ui.label().classes("value")
                    ui.label(name).classes("name")
            self._values[name].text = value

    def _draw_scores(self) -> None:
        wish = CurveOptions(axis=self._axis.value)
        log = bool(self._log.value)
        drawn = (self._run.drawn, wish, log)
        if drawn == self._drawn_scores:
            return
        self._drawn_scores = drawn
        found = panels([self._run], wish)
        self._no_score.set_visibility(not found)
        self._score_place.set_visibility(bool(found))
        if not found:
            self._no_score.text = undrawn([self._run], wish) or "No episode has ended yet."
            return
        options = panel_chart(found[0], wish, published=True, log=log)
        scores = found[0].groups[0].runs[0].scores
        dots = thinned(np.stack([scores.at, scores.score], 1), _DOTS)
        options["series"].insert(0, _dots("episodes", pairs(dots[:, 0], dots[:, 1], log=log)))
        evaluated = panels([self._run], CurveOptions(axis=wish.axis, evaluations=True))
        points = evaluated[0].groups[0].runs[0].scores if evaluated else None
        self._evaluation = float(points.score[-1]) if points else None
        options["series"].append(
            {
                **_dots("evaluation", pairs(points.at, points.score, log=log) if points else []),
                "symbol": "diamond",
                "symbolSize": 11,
                "itemStyle": {"color": COLORS[1], "opacity": 1},
                "z": 5,
                "silent": False,
                "tooltip": {"trigger": "item"},
            }
        )
        draw(self._charts, "score", options, self._score_place, "chart tall score")

    def _draw_metrics(self) -> None:
        run = self._run
        if run.metrics.rows == self._drawn_metrics:
            return
        self._drawn_metrics = run.metrics.rows
        with run.lock:
            columns = {key: column.points for key, column in run.metrics.columns.items()}
        for chart in _CHARTS:
            keys = [key for key in columns if re.fullmatch(chart.pattern, key)]
            if not keys:
                continue
            curves = [(_short(key), thinned(columns[key], _POINTS)) for key in sorted(keys)[:8]]
            log = chart.log and all((points[:, 1] > 0).any() for _, points in curves)
            options = curves_chart(curves, log=log, tools=False)
            box = card(chart.title, chart.note, within=self._grid)
            draw(self._charts, chart.title, options, box)


def _dots(name: str, data: list[list[float | None]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "data": data,
        "symbolSize": 3,
        "itemStyle": {"color": COLORS[0], "opacity": 0.35},
        "emphasis": {"disabled": True},
        "silent": True,
        "tooltip": {"show": False},
    }


def _short(key: str) -> str:
    """A metric's name in a chart that says which group it is of."""
    return re.sub(r"^(train|report|learner)/(loss/|opt/)?", "", key)


def progress_words(step: int, steps: int, status: RunStatus | None) -> str:
    """How far a run is."""
    words = f"{readable(step)} of {readable(steps)} steps" if steps else f"{readable(step)} steps"
    if status is not None and status.share is not None:
        words += f" · {status.share:.0%}"
    if status is not None and status.running:
        words += f" · {clock(status.seconds)} running"
        if status.seconds_left is not None:
            words += f" · {clock(status.seconds_left)} left"
    return words


def newest(run: Run, key: str) -> float | None:
    """The newest value of a metric: of the logger, or of the file."""
    value = run.status.metrics.get(key) if run.status else None
    if value is None:
        value = run.metrics.newest.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _numbers(run: Run, status: RunStatus | None, evaluation: float | None) -> dict[str, str]:
    found: dict[str, float | None] = {"score": run.row.score}
    if status is not None:
        found["best episode"] = status.scores.best
        found["episodes"] = float(status.scores.count)
    evaluated = [evaluation, *(newest(run, key) for key in ("eval_score", "eval/score"))]
    found["evaluation"] = next((v for v in evaluated if v is not None), None)
    found["steps/s"] = run.row.rate
    found["updates"] = newest(run, "learner/updates")
    found["updates/s"] = newest(run, "learner/updates_per_second")
    found["replay ratio"] = newest(run, "learner/replay_ratio")
    found["updates behind"] = newest(run, "actor/policy/updates_behind")
    return {
        name: readable(float(f"{value:.4g}")) for name, value in found.items() if value is not None
    }
