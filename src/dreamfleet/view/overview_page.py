"""A run: its progress, its scores, the metrics that matter most, and notes about it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from urllib.parse import urlencode

from nicegui import ui

from dreamfleet.fleet.record import RunStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.view.actions import add_actions
from dreamfleet.view.charts import (
    AXES,
    COLORS,
    Chart,
    CurveOptions,
    add_diamonds,
    missing_hours,
    panel_chart,
    panels,
)
from dreamfleet.view.frame import RunPage, card, draw, show
from dreamfleet.view.reading import thinned
from dreamfleet.view.runs import EVALUATION, SCORE, Run

_DRAW_SECONDS = 5.0  # drawing is most of what an open page costs
_MAX_POINTS = 250
_CHARTS = (
    ("World model", "losses", r"train/loss/(reconstruction/.+|reward|continue|mask)", True),
    ("Latent state", "KL divergence, nats", r"train/loss/(dynamics|representation)", False),
    ("Actor and critic", "imagined", r"train/(value|target|slow_value)", False),
    ("Exploration", "0 deterministic, 1 uniform", r"train/randomness/.+", False),
    ("Gradient", "norm before clipping", r"train/(opt/grad_norm|gradient_norm/.+)", True),
    ("Speed", "per second", r"(actor(-\d+)?/steps|learner/updates)_per_second", False),
    ("Replay ratio", "replayed per collected step", r"learner/replay_ratio", False),
    ("Policy age", "updates behind the learner", r"actor(-\d+)?/policy/updates_behind", False),
)
"""Title, note, pattern of the metrics, and whether the axis is logarithmic."""
_SHORT = re.compile(r"^(train|report|learner)/(loss/|opt/)?")
"""What a name leaves out in a chart whose title names the group."""


class OverviewPage(RunPage):
    """Progress, scores and curves."""

    path, seconds = "run", 1.0

    def build(self) -> None:
        self._draw_at = 0.0
        self._drawn: dict[str, object] = {}
        self._charts: dict[str, ui.echart] = {}
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
        self._bar = ui.linear_progress(0, show_value=False, size="8px").props("rounded")
        self._bar.classes("progress")
        self._message = ui.label().classes("message")
        self._numbers = ui.label().classes("numbers")
        known = self._run.annotations()
        with ui.element("div").classes("row-of notes"):
            self._note = ui.input("note", value=known.note).classes("note")
            self._tags = ui.input("tags: a, b", value=", ".join(known.tags))
            for box in (self._note, self._tags):
                box.props("dense outlined").on("blur", self._annotate)
                box.on("keydown.enter", self._annotate)

    def _annotate(self) -> None:
        try:
            self._run.annotate(self._note.value or "", (self._tags.value or "").split(","))
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
        show(self._message, status.message if status and not row.alert else "")
        if status is not None:
            self._bar.value = status.share or 0.0
            self._numbers.text = " · ".join(numbers_of(self._run, status, self._evaluation))

    def _is_drawn(self, what: str, version: object) -> bool:
        before, self._drawn[what] = self._drawn.get(what), version
        return before == version

    def _draw_scores(self) -> None:
        run, options = self._run, CurveOptions(axis=self._axis.value, log=bool(self._log.value))
        if self._is_drawn("scores", (run.version(SCORE), run.version(EVALUATION), options)):
            return
        found = panels([run], SCORE, options)
        self._place.set_visibility(bool(found))
        none = missing_hours([run], options) or "No episode has ended yet."
        show(self._no_score, "" if found else none)
        if found:
            chart = panel_chart(found[0], SCORE, options)
            self._evaluation = add_diamonds(chart, run, options)
            draw(self._charts, "score", chart.options, self._place, "chart tall score")

    def _draw_metrics(self) -> None:
        run = self._run
        if self._is_drawn("metrics", run.metrics.rows):
            return
        with run.lock:
            columns = {key: column.points for key, column in run.metrics.columns.items()}
        for title, note, pattern, log in _CHARTS:
            keys = sorted(key for key in columns if re.fullmatch(pattern, key))[:8]
            if not keys:
                continue
            positive = all((columns[key][:, 1] > 0).any() for key in keys)
            chart = Chart("steps", log=log and positive, tools=False)
            for number, key in enumerate(keys):
                x, y = thinned(columns[key], _MAX_POINTS).T[:2]
                chart.line(_SHORT.sub("", key), x, y, COLORS[number % len(COLORS)])
            link = f"/curves?{urlencode([('run', run.name), *(('metric', key) for key in keys)])}"
            draw(self._charts, title, chart.options, card(title, note, self._grid, link))


def numbers_of(run: Run, status: RunStatus, evaluation: float | None) -> list[str]:
    """What `dreamfleet status` tells in a line; of a run that has ended, from its files."""
    known = {key: value for key, value in run.metrics.newest.items() if value is not None}
    known |= {} if evaluation is None else {"eval_score": evaluation}
    rate = run.row.rate or 0.0
    status = replace(status, metrics={**known, **status.metrics}, steps_per_second=rate)
    fields = [*status.line().split("  "), f"{status.scores.count:,} episodes"]
    fields += [f"best {readable(status.scores.best)}"] if status.scores.best is not None else []
    fields += [f"{clock(status.seconds)} running"] if status.running else []
    behind = run.newest("actor/policy/updates_behind")
    return [*fields, *([] if behind is None else [f"{readable(behind)} updates behind"])]
