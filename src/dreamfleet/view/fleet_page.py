"""The processes of a run: a picture, who waits for whom, restarts, and what they use."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

import numpy as np
from nicegui import ui

from dreamfleet.fleet.status import MachineStatus, RunStatus, WorkerStatus
from dreamfleet.formatting import clock, readable
from dreamfleet.view.charts import COLORS, base, line
from dreamfleet.view.frame import RunPage, card, draw
from dreamfleet.view.run_page import newest
from dreamfleet.view.runs import Happening, Run, Sample

_DRAW_SECONDS = 3.0
_TRAFFIC_SECONDS = 40.0
_WAITS = 0.3
_SHOWN_EVENTS = 6
_CHARTS = (("Processor", "cores", "cpu"), ("Memory", "bytes", "memory"), ("Disk", "bytes", "disk"))


class FleetPage(RunPage):
    """A picture, a time line and charts."""

    path, seconds = "fleet", 1.0

    def build(self) -> None:
        self._drawn = 0.0
        self._charts: dict[str, ui.echart] = {}
        with card("Fleet"):
            self._sentence = ui.label().classes("muted")
            self._pictures = self._add_pictures()
        with card("Restarts", "when a process failed, and when it was started again"):
            self._lines = self._add_pictures()
            self._events = ui.html()
        self._grid = ui.element("div").classes("grid")

    def refresh(self) -> None:
        run, status = self._run, self._run.status
        if status is None:
            return
        self._sentence.text = who_waits(run, status)
        with run.lock:
            happenings = list(run.happenings)
        rates, now = traffic(list(run.samples)), time.time()
        for narrow in (False, True):
            self._pictures[narrow].content = fleet_picture(status, rates, run.hurt, narrow=narrow)
            self._lines[narrow].content = time_line(happenings, now, narrow=narrow)
        self._events.content = events(happenings, now)
        if time.monotonic() - self._drawn > _DRAW_SECONDS and len(run.samples) > 1:
            self._drawn = time.monotonic()
            self._draw(list(run.samples))

    def _add_pictures(self) -> dict[bool, ui.html]:
        """A wide one, and one for a phone, of which one is shown."""
        return {
            narrow: ui.html().classes(f"picture {'narrow-only' if narrow else 'wide-only'}")
            for narrow in (False, True)
        }

    def _draw(self, samples: Sequence[Sample]) -> None:
        minutes = (np.array([each.time for each in samples]) - samples[-1].time) / 60
        for number, (title, unit, field) in enumerate(_CHARTS):
            values = np.array([getattr(each, field) for each in samples], np.float64)
            options = base("minutes ago", tools=False)
            options["xAxis"] |= {"min": "dataMin", "max": 0}
            options["xAxis"]["axisLabel"]["showMinLabel"] = False  # it is no round number
            options["yAxis"]["min"] = 0
            options["series"] = [line(title, minutes, values, COLORS[number], areaStyle=_AREA)]
            box = card(title, f"{unit}, since this page was opened", within=self._grid)
            draw(self._charts, title, options, box, "chart low")


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


def time_line(happenings: Sequence[Happening], now: float, *, narrow: bool = False) -> str:
    """Failures and starts, a row for each worker."""
    names = list(dict.fromkeys(each.worker for each in happenings))[:24]
    start = min((each.time for each in happenings), default=now)
    span = max(now - start, 1.0)
    left, width, row = (92.0, 200.0, 20.0) if narrow else (120.0, 800.0, 20.0)
    parts = []
    for number, name in enumerate(names):
        y = 14 + number * row
        parts.append(_text(0, y + 4, name[: int(left / 6.6)]))
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
    height = 14 + len(names) * row + 20
    parts += [_text(left, height - 6, _ago(now, start))]
    parts += [_text(left + width, height - 6, "now", "words end")]
    return _svg(parts, left + width + 8, height, "restarts") if names else ""


def events(happenings: Sequence[Happening], now: float) -> str:
    """The last failures in words."""
    failures = [each for each in happenings if each.event == "failed"]
    if not happenings:
        return '<div class="muted">No process has failed.</div>'
    words = "".join(
        f"<li><b>{escape(each.worker)}</b> {escape(_ago(now, each.time))}: "
        f"{escape(each.error or 'ended')}</li>"
        for each in failures[: -_SHOWN_EVENTS - 1 : -1]
    )
    count = "1 failure" if len(failures) == 1 else f"{readable(len(failures))} failures"
    return f'<div class="small muted">{count}</div><ul class="events">{words}</ul>'


def _ago(now: float, then: float) -> str:
    return f"{clock(max(0.0, now - then))} ago"


# --- machines, processes and links ---------------------------------------------------------------

# Colour says how a process is, and the width of a link how much goes over it. On a phone processes
# stand below each other, without links. All text is escaped.

_WIDTH, _NODE, _PHONE, _ROW, _GAP = 940.0, 216.0, 300.0, 72.0, 22.0
_CELL, _CELLS_A_ROW, _MOST_CELLS = 13.0, 12, 240
_ORDER = ("restarting", "starting", "ended", "running")
_COLUMNS = {"env": 0, "eval": 0, "agent": 1, "actor": 1, "evaluator": 1, "replay": 2, "logger": 2}


@dataclass(frozen=True)
class _Node:
    role: str
    title: str
    workers: Sequence[WorkerStatus]
    x: float
    y: float
    size: tuple[float, float]

    @property
    def state(self) -> str:
        return min((worker.state for worker in self.workers), key=_ORDER.index)


def fleet_picture(
    status: RunStatus, rates: Mapping[str, float], hurt: Collection[str], *, narrow: bool = False
) -> str:
    """The picture as SVG, with bytes a second between the agent and other roles. Workers are hurt
    that have failed a moment ago."""
    workers = [
        replace(worker, state="restarting") if worker.name in hurt else worker
        for worker in status.workers
    ]
    nodes, bottom = _nodes(workers, narrow)
    machines, bottom = _joined(status.machines, bottom, 1 if narrow else 4)
    links = [] if narrow else _links(nodes, rates)
    parts = [*links, *(_node(node, rates if narrow else {}) for node in nodes), *machines]
    width = _PHONE if narrow else _WIDTH
    return _svg(parts, width, bottom + 8, "the processes of the run")


def _svg(parts: Sequence[str], width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" class="fleet" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _nodes(workers: Sequence[WorkerStatus], narrow: bool) -> tuple[list[_Node], float]:
    """A box for each role, and each machine that has workers of it, in three columns or in one."""
    bottoms: dict[int, float] = {0: 4.0, 1: 4.0, 2: 4.0}
    nodes = []
    several = len({worker.host for worker in workers if worker.host}) > 1
    for (role, host), group in groupby(workers, key=lambda worker: (worker.role, worker.host)):
        members = list(group)
        column = 0 if narrow else _COLUMNS.get(role, 1)
        rows = math.ceil(min(len(members), _MOST_CELLS) / _CELLS_A_ROW) if len(members) > 1 else 0
        height = 62 + rows * _CELL
        x = 4 + column * (_WIDTH - _NODE - 8) / 2
        name = role if len(members) == 1 else f"{role} x {len(members)}"
        title = f"{name} on {host}" if host and several else name
        size = (_PHONE - 8 if narrow else _NODE, height)
        nodes.append(_Node(role, title, members, x, bottoms[column], size))
        bottoms[column] += height + (10 if narrow else _GAP)
    return nodes, max(bottoms.values())


def _node(node: _Node, rates: Mapping[str, float]) -> str:
    usages = [worker.usage for worker in node.workers if worker.usage is not None]
    words = [node.state]
    if usages:
        memory = readable(sum(usage.memory for usage in usages))
        words = [f"{sum(usage.cpu for usage in usages):.1f} cores", f"{memory}B"]
    if restarts := sum(worker.restarts for worker in node.workers):
        words.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if rate := rates.get(node.role):
        words.append(f"{readable(round(rate))}B/s")
    cells = []
    for number, worker in enumerate(node.workers[:_MOST_CELLS] if len(node.workers) > 1 else ()):
        row, column = divmod(number, _CELLS_A_ROW)
        x, y = node.x + 16 + column * _CELL, node.y + 50 + row * _CELL
        cells.append(
            f'<rect x="{x:g}" y="{y:g}" width="9" height="9" rx="2" class="cell {worker.state}">'
            f"<title>{escape(_about(worker))}</title></rect>"
        )
    about = "\n".join(_about(worker) for worker in node.workers[:20])
    said = (node.title, " · ".join(words), about)
    return _box(node.x, node.y, node.size, node.state, node.role, said, "".join(cells))


def _box(
    x: float,
    y: float,
    size: tuple[float, float],
    state: str,
    role: str,
    said: tuple[str, str, str],
    inside: str = "",
) -> str:
    """A box with a light, a title, words, and what is told of it."""
    title, words, about = said
    return (
        f'<g class="node {state}" data-role="{escape(role)}"><rect x="{x:g}" y="{y:g}" '
        f'width="{size[0]:g}" height="{size[1]:g}" rx="10" class="box">'
        f"<title>{escape(about)}</title></rect>"
        f'<circle cx="{x + 18:g}" cy="{y + 22:g}" r="4.5" class="light"/>'
        f"{_text(x + 30, y + 27, title[:24], 'title')}{_text(x + 16, y + 44, words)}{inside}</g>"
    )


def _text(x: float, y: float, words: str, kind: str = "words") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def _about(worker: WorkerStatus) -> str:
    words = f"{worker.name}: {worker.state}"
    if worker.pid is not None:
        words += f", process {worker.pid}, for {clock(worker.seconds)}"
    if worker.restarts:
        words += f", {worker.restarts} restarts"
    return f"{words}, last failure: {worker.error}" if worker.error else words


def _links(nodes: Sequence[_Node], rates: Mapping[str, float]) -> list[str]:
    found = []
    agent = next((node for node in nodes if node.role == "agent"), None)
    if agent is None:
        return []
    for other in ("env", "replay", "logger"):
        rate = rates.get(other, 0.0)
        for node in (node for node in nodes if node.role == other):
            left, right = (node, agent) if node.x < agent.x else (agent, node)
            x1, y1 = left.x + _NODE, left.y + 30
            x2, y2 = right.x, right.y + 30
            middle = (x1 + x2) / 2
            width = 1.5 + min(7.0, max(0.0, math.log10(max(rate, 1.0)) - 2) * 1.3)
            states = {node.state, agent.state}
            kind = "" if states == {"running"} else "over" if states == {"ended"} else "cut"
            words = f"{readable(round(rate))}B/s" if rate else ""
            found.append(
                f'<path d="M{x1:g},{y1:g} C{middle:g},{y1:g} {middle:g},{y2:g} {x2:g},{y2:g}" '
                f'class="link {kind}" style="stroke-width:{width:.1f}"/>'
                f"{_text(middle, (y1 + y2) / 2 - 7, words, 'words mid')}"
            )
    return found


def _joined(machines: Sequence[MachineStatus], top: float, columns: int) -> tuple[list[str], float]:
    """Machines that have joined, below the others."""
    shown = [machine for machine in machines if machine.state != "left"][:24]
    width, gap = (_PHONE - 8, 0) if columns == 1 else (_WIDTH - 8, 14)
    parts = []
    for number, machine in enumerate(shown):
        row, column = divmod(number, columns)
        x, y = 4 + column * width / columns, top + row * _ROW
        words = f"{machine.envs + machine.eval_envs} envs · {machine.steps_per_second:.0f} steps/s"
        if machine.state == "away":
            words = f"away for {clock(machine.silence)}"
        said = (machine.name, words, machine.error or machine.name)
        parts.append(_box(x, y, (width / columns - gap, 56.0), machine.state, "machine", said))
    return parts, top + math.ceil(len(shown) / columns) * _ROW
