"""The processes of a run: a picture, who waits for whom, restarts, and what they use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

import numpy as np
from nicegui import ui

from dreamfleet.fleet.status import RunStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.view.charts import COLORS, base, line
from dreamfleet.view.frame import card, find_run, frame, keep_fresh, replace_options
from dreamfleet.view.picture import fleet_picture
from dreamfleet.view.run_page import newest
from dreamfleet.view.runs import Happening, Run, Runs, Sample

_REFRESH_SECONDS = 1.0
_DRAW_SECONDS = 3.0
_TRAFFIC_SECONDS = 40.0
_WAITS = 0.3
_SHOWN_EVENTS = 200
_CHARTS = (("Processor", "cores", "cpu"), ("Memory", "bytes", "memory"), ("Disk", "bytes", "disk"))


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/fleet")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is not None:
            _Fleet(runs, found)


class _Fleet:
    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        self._drawn = 0.0
        self._charts: dict[str, ui.echart] = {}
        runs.attend(run.name)
        with frame(runs, run, "fleet"):
            with card("Fleet"):
                self._sentence = ui.label().classes("muted")
                self._picture = ui.html().classes("picture")
            with card("Restarts", "when a process failed, and when it was started again"):
                self._line = ui.html().classes("picture")
            self._grid = ui.element("div").classes("grid")
        keep_fresh(self.refresh, _REFRESH_SECONDS)

    def refresh(self) -> None:
        """Show what has changed."""
        run = self._run
        self._runs.attend(run.name)
        status = run.status
        if status is None:
            return
        self._sentence.text = who_waits(run, status)
        self._picture.content = fleet_picture(status, traffic(list(run.samples)), run.hurt)
        with run.lock:
            happenings = list(run.happenings)
        self._line.content = time_line(happenings, time.time())
        if time.monotonic() - self._drawn > _DRAW_SECONDS and len(run.samples) > 1:
            self._drawn = time.monotonic()
            self._draw(list(run.samples))

    def _draw(self, samples: Sequence[Sample]) -> None:
        minutes = (np.array([each.time for each in samples]) - samples[-1].time) / 60
        for number, (title, unit, field) in enumerate(_CHARTS):
            values = np.array([getattr(each, field) for each in samples], np.float64)
            options = base("minutes ago", tools=False)
            options["xAxis"] |= {"min": "dataMin", "max": 0}
            options["xAxis"]["axisLabel"]["showMinLabel"] = False  # it is no round number
            options["yAxis"]["min"] = 0
            options["series"] = [line(title, minutes, values, COLORS[number], areaStyle=_AREA)]
            if title in self._charts:
                replace_options(self._charts[title], options)
            else:
                with self._grid, card(title, f"{unit}, since this page was opened"):
                    self._charts[title] = ui.echart(options).classes("chart low")


_AREA = {"opacity": 0.12}


def who_waits(run: Run, status: RunStatus) -> str:
    """Who waits for whom, in one sentence."""
    if status.message:
        return status.message
    waits = newest(run, "learner/timer/wait/frac") or 0.0
    if waits > _WAITS:
        return (
            f"The learner waits for batches {waits:.0%} of its time: environments and actor are "
            "slower than it."
        )
    actor = str(status.metrics.get("replay/waiting/actor", ""))
    if actor:
        return f"The actor waits: {actor}."
    return "Nobody waits for long."


def traffic(samples: Sequence[Sample]) -> dict[str, float]:
    """Bytes a second between the agent and others, over the last while."""
    if len(samples) < 2:
        return {}
    last = samples[-1]
    first = next(each for each in samples if last.time - each.time <= _TRAFFIC_SECONDS)
    seconds = max(last.time - first.time, 1e-3)
    return {
        role: max(0.0, count - first.traffic.get(role, 0.0)) / seconds
        for role, count in last.traffic.items()
    }


def time_line(happenings: Sequence[Happening], now: float) -> str:
    """Failures and starts, a row for each worker, and the last of them in words."""
    if not happenings:
        return '<div class="muted">No process has failed.</div>'
    names = list(dict.fromkeys(each.worker for each in happenings))[:24]
    start = min(each.time for each in happenings)
    span = max(now - start, 1.0)
    left, width, row = 120.0, 800.0, 20.0
    parts = []
    for number, name in enumerate(names):
        y = 14 + number * row
        parts.append(f'<text x="0" y="{y + 4:g}" class="words">{escape(name[:18])}</text>')
        parts.append(f'<path d="M{left:g},{y:g} h{width:g}" class="axis"/>')
        down: float | None = None
        for each in [*(e for e in happenings if e.worker == name), Happening(now, name, "now")]:
            x = left + (each.time - start) / span * width
            if each.event == "failed":
                down = x
                about = f"{_ago(now, each.time)}: {each.error}"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:g}" r="5" class="failed">'
                    f"<title>{escape(about)}</title></circle>"
                )
            elif down is not None:
                parts.append(f'<path d="M{down:.1f},{y:g} H{x:.1f}" class="down"/>')
                down = None
    height = 14 + len(names) * row + 16
    ends = (
        f'<text x="{left:g}" y="{height - 2:g}" class="words">{escape(_ago(now, start))}</text>'
        f'<text x="{left + width:g}" y="{height - 2:g}" class="words end">now</text>'
    )
    failures = [each for each in happenings if each.event == "failed"]
    words = "".join(
        f"<li><b>{escape(each.worker)}</b> {escape(_ago(now, each.time))}: "
        f"{escape(each.error or 'ended')}</li>"
        for each in failures[: -_SHOWN_EVENTS - 1 : -1][:6]
    )
    count = f"{readable(len(failures))} failures"
    return (
        f'<svg viewBox="0 0 940 {height:g}" class="fleet" role="img" aria-label="restarts">'
        f'{"".join(parts)}{ends}</svg><div class="small muted">{count}</div>'
        f'<ul class="events">{words}</ul>'
    )


def _ago(now: float, then: float) -> str:
    return f"{clock(max(0.0, now - then))} ago"
