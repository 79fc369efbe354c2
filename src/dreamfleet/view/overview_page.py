"""A run: its progress, its scores, the metrics that matter most, and notes about it."""

from __future__ import annotations

import re
import time
from typing import NamedTuple
from urllib.parse import urlencode

from nicegui import ui

from dreamfleet.fleet.record import RunStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.view.actions import add_actions
from dreamfleet.view.charts import (
    AXES,
    CurveOptions,
    add_diamonds,
    metrics_chart,
    missing_hours,
    panel_chart,
    panels,
)
from dreamfleet.view.frame import RunPage, card, draw
from dreamfleet.view.reading import thinned
from dreamfleet.view.runs import EVALUATION, SCORE, Run

_DRAW_SECONDS = 5.0  # drawing is most of what an open page costs
_MAX_POINTS = 250


class _Chart(NamedTuple):
    title: str
    note: str
    pattern: str
    """Of its metrics."""
    log: bool = False


_CHARTS = (
    _Chart("World model", "losses", r"train/loss/(reconstruction/.+|reward|continue|mask)", True),
    _Chart("Latent state", "KL divergence, nats", r"train/loss/(dynamics|representation)"),
    _Chart("Actor and critic", "imagined", r"train/(value|target|slow_value)"),
    _Chart("Exploration", "0 deterministic, 1 uniform", r"train/randomness/.+"),
    _Chart("Gradient", "norm before clipping", r"train/(opt/grad_norm|gradient_norm/.+)", True),
    _Chart("Speed", "per second", r"(actor(-\d+)?/steps|learner/updates)_per_second"),
    _Chart("Replay ratio", "replayed per collected step", r"learner/replay_ratio"),
    _Chart("Policy age", "updates behind the learner", r"actor(-\d+)?/policy/updates_behind"),
)


class OverviewPage(RunPage):
    """Progress, scores and curves."""

    path, seconds = "run", 1.0

    def build(self) -> None:
        self._draw_at = 0.0
        self._drawn_scores: object = None
        self._drawn_metrics: object = None
        self._charts: dict[str, ui.echart] = {}
        self._values: dict[str, ui.label] = {}
        self._evaluation: float | None = None
        with card():
            self._add_head()
        with card("Score", "training episodes; diamonds are evaluations"):
            with ui.element("div").classes("row-of options"):
                self._axis = ui.toggle(list(AXES), value="steps", on_change=self._draw_scores)
                self._axis.props("dense no-caps unelevated")
                self._log = ui.switch("log", on_change=self._draw_scores).props("dense")
            self._place = ui.element("div")
            self._no_score = ui.label().classes("muted")
        self._grid = ui.element("div").classes("grid")

    def _add_head(self) -> None:
        with ui.element("div").classes("row-of"):
            with ui.element("div"):
                self._dot = ui.element("span").classes("dot")
                self._state = ui.label().classes("strong state")
            self._about = ui.label().classes("muted")
            ui.element("div").classes("space")
            add_actions(self._run)
        with ui.element("div").classes("progress"):
            with ui.element("div").classes("bar"):
                self._bar = ui.element("div")
            self._progress = ui.label().classes("small muted")
        self._message = ui.label().classes("message")
        self._numbers = ui.element("div").classes("numbers")
        known = self._run.annotations()
        with ui.element("div").classes("row-of notes"):
            self._note = ui.input("note", value=known.note).classes("note")
            self._tags = ui.input("tags: a, b", value=", ".join(known.tags))
            for box in (self._note, self._tags):
                box.props("dense outlined").on("blur", self._annotate)
                box.on("keydown.enter", self._annotate)

    def _annotate(self) -> None:
        tags = (self._tags.value or "").split(",")
        try:
            self._run.annotate(self._note.value or "", tags)
        except OSError as error:
            ui.notify(f"The run's directory cannot be written: {error.strerror}.")

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
        about = [row.task, row.preset, f"seed {row.seed}", row.machine]
        self._about.text = " · ".join(filter(None, about))
        share = (status.share if status else None) or 0.0
        self._bar.style(f"width: {100 * share:.1f}%")
        self._progress.text = progress_text(row.step, row.steps, status)
        self._message.text = status.message if status and not row.alert else ""
        self._message.set_visibility(bool(self._message.text))
        for name, value in _numbers(self._run, status, self._evaluation).items():
            if name not in self._values:
                with self._numbers, ui.element("div").classes("number"):
                    self._values[name] = ui.label().classes("value")
                    ui.label(name).classes("name")
            self._values[name].text = value

    def _draw_scores(self) -> None:
        run, options = self._run, CurveOptions(axis=self._axis.value, log=bool(self._log.value))
        drawn = (run.version(SCORE), run.version(EVALUATION), options)
        if drawn == self._drawn_scores:
            return
        self._drawn_scores = drawn
        found = panels([run], SCORE, options)
        self._place.set_visibility(bool(found))
        self._no_score.set_visibility(not found)
        if not found:
            self._no_score.text = missing_hours([run], options) or "No episode has ended yet."
            return
        chart = panel_chart(found[0], SCORE, options)
        self._evaluation = add_diamonds(chart, run, options)
        draw(self._charts, "score", chart, self._place, "chart tall score")

    def _draw_metrics(self) -> None:
        run = self._run
        if run.metrics.rows == self._drawn_metrics:
            return
        self._drawn_metrics = run.metrics.rows
        with run.lock:
            columns = {key: column.points for key, column in run.metrics.columns.items()}
        for each in _CHARTS:
            keys = sorted(key for key in columns if re.fullmatch(each.pattern, key))[:8]
            if not keys:
                continue
            curves = [(_short(key), thinned(columns[key], _MAX_POINTS)) for key in keys]
            log = each.log and all((points[:, 1] > 0).any() for _, points in curves)
            link = f"/curves?{urlencode([('run', run.name), *(('metric', key) for key in keys)])}"
            place = card(each.title, each.note, within=self._grid, link=link)
            draw(self._charts, each.title, metrics_chart(curves, log=log), place)


def _short(key: str) -> str:
    """A metric's name in a chart whose title names the group."""
    return re.sub(r"^(train|report|learner)/(loss/|opt/)?", "", key)


def progress_text(step: int, steps: int, status: RunStatus | None) -> str:
    """How far a run is."""
    text = f"{readable(step)} of {readable(steps)} steps" if steps else f"{readable(step)} steps"
    if status is not None and status.share is not None:
        text += f" · {status.share:.0%}"
    if status is not None and status.running:
        text += f" · {clock(status.seconds)} running"
        if status.seconds_left is not None:
            text += f" · {clock(status.seconds_left)} left"
    return text


def _numbers(run: Run, status: RunStatus | None, evaluation: float | None) -> dict[str, str]:
    found: dict[str, float | None] = {"score": run.row.score}
    if status is not None:
        found["best episode"] = status.scores.best
        found["episodes"] = float(status.scores.count)
    evaluated = [evaluation, run.newest("eval_score"), run.newest("eval/score")]
    found["evaluation"] = next((value for value in evaluated if value is not None), None)
    found["steps/s"] = run.row.rate
    found["updates"] = run.newest("learner/updates")
    found["updates/s"] = run.newest("learner/updates_per_second")
    found["replay ratio"] = run.newest("learner/replay_ratio")
    found["updates behind"] = run.newest("actor/policy/updates_behind")
    return {
        name: readable(float(f"{value:.4g}")) for name, value in found.items() if value is not None
    }
