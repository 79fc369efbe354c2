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
from dreamfleet.view.frame import Refresh, card, draw, show
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


def build_overview(run: Run) -> Refresh:
    """Progress, scores and curves."""
    with card():
        refresh_head = _add_head(run)
    with card("Score", "training episodes; diamonds are evaluations"):
        with ui.element("div").classes("row-of options"):
            axis = ui.toggle(list(AXES), value="steps", on_change=lambda: draw_scores())
            axis.props("dense no-caps unelevated")
            log = ui.switch("log", on_change=lambda: draw_scores()).props("dense")
        place, no_score = ui.element("div"), ui.label().classes("muted")
    grid = ui.element("div").classes("grid")
    charts: dict[str, ui.echart] = {}
    drawn: object = None
    drawn_at = 0.0

    def draw_scores() -> None:
        options = CurveOptions(axis=axis.value, log=bool(log.value))
        found = panels([run], SCORE, options)
        place.set_visibility(bool(found))
        none = missing_hours([run], options) or "No episode has ended yet."
        show(no_score, "" if found else none)
        if found:
            chart = panel_chart(found[0], SCORE, options)
            add_diamonds(chart, run, options)
            draw(charts, "score", chart.options, place, "chart tall score")

    def refresh() -> None:
        nonlocal drawn, drawn_at
        refresh_head()
        now, version = time.monotonic(), run.version
        if version != drawn and (now - drawn_at > _DRAW_SECONDS or len(charts) < 2):
            drawn, drawn_at = version, now
            draw_scores()
            _draw_metrics(run, charts, grid)

    return refresh


def _draw_metrics(run: Run, charts: dict[str, ui.echart], grid: ui.element) -> None:
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
        draw(charts, title, chart.options, card(title, note, grid, link))


def _add_head(run: Run) -> Refresh:
    """State, buttons, progress, numbers, note and tags."""

    def annotate() -> None:
        try:
            run.annotate(note.value or "", (tags.value or "").split(","))
        except OSError as error:
            ui.notify(f"The run's directory cannot be written: {error.strerror}.")

    with ui.element("div").classes("row-of"):
        with ui.element("div"):
            dot = ui.element("span").classes("dot")
            state = ui.label().classes("strong state")
        about = ui.label().classes("muted")
        ui.element("div").classes("space")
        refresh_actions = add_actions(run)
    bar = ui.linear_progress(0, show_value=False, size="8px").props("rounded")
    bar.classes("progress")
    message, numbers = ui.label().classes("message"), ui.label().classes("numbers")
    known = run.annotations()
    with ui.element("div").classes("row-of notes"):
        note = ui.input("note", value=known.note).classes("note")
        tags = ui.input("tags: a, b", value=", ".join(known.tags))
        for box in (note, tags):
            box.props("dense outlined").on("blur", annotate).on("keydown.enter", annotate)

    def refresh() -> None:
        refresh_actions()
        row, status = run.row, run.status
        if state.text != row.state:
            dot.classes(replace=f"dot {row.state}")
            state.text = row.state
        about.text = " · ".join(
            filter(None, [row.task, row.preset, f"seed {row.seed}", row.machine])
        )
        show(message, status.message if status and not row.alert else "")
        if status is not None:
            bar.value = status.share or 0.0
            numbers.text = " · ".join(numbers_of(run, status))

    return refresh


def numbers_of(run: Run, status: RunStatus) -> list[str]:
    """What `dreamfleet status` tells in a line; of a run that has ended, from its files."""
    known = {key: value for key, value in run.metrics.newest.items() if value is not None}
    evaluated = run.points(EVALUATION)
    known |= {} if evaluated is None else {"eval_score": float(evaluated[-1, 1])}
    rate = run.row.rate or 0.0
    status = replace(status, metrics={**known, **status.metrics}, steps_per_second=rate)
    fields = [*status.line().split("  "), f"{status.scores.count:,} episodes"]
    fields += [f"best {readable(status.scores.best)}"] if status.scores.best is not None else []
    fields += [f"{clock(status.seconds)} running"] if status.running else []
    behind = run.newest("actor/policy/updates_behind")
    return [*fields, *([] if behind is None else [f"{readable(behind)} updates behind"])]
