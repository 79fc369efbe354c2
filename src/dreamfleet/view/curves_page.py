"""The table of runs, and any metric of any runs as curves. The address holds what is chosen."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import lru_cache
from typing import Any, get_args
from urllib.parse import urlencode

from fastapi import Request
from nicegui import ui
from nicegui.events import GenericEventArguments

from dreamfleet.formatting import readable
from dreamfleet.metrics.glossary import explain
from dreamfleet.plotting import Panel, differing
from dreamfleet.view.charts import (
    AXES,
    Axis,
    CurveOptions,
    missing_hours,
    panel_chart,
    panels,
    to_csv,
)
from dreamfleet.view.frame import (
    card,
    dot_cell,
    draw,
    find_run,
    frame,
    keep_fresh,
    search_box,
    table,
)
from dreamfleet.view.overview_page import OverviewPage
from dreamfleet.view.runs import EVALUATION, SCORE, Run, Runs

_REFRESH_SECONDS = 2.0
_MAX_RUNS, _FIRST_RUNS, _MAX_METRICS = 40, 8, 12
_NAMES = ("name", "task", "preset", "seed", "state", "step", "score", "rate", "hours", "machine")
_LABELS = {name: name for name in (*_NAMES, "tags", "note")}
_LABELS |= {"name": "run", "rate": "steps/s", "hours": "time"}
_NAME_CELL = """<q-td :props="props"><a :href="'/run?run=' + encodeURIComponent(props.row.name)"
 :title="props.row.name" @click.stop>{{ props.row.name }}</a></q-td>"""
_SWITCHES = {"log": "log", "join_seeds": "join seeds", "published": "published"}


def add(runs: Runs) -> None:
    """Add the first page, and the page of curves."""

    @ui.page("/")
    def first(request: Request) -> None:
        if not runs.single:
            CurvesPage(runs, request)
        elif (found := find_run(runs, "")) is not None:
            OverviewPage(runs, found)

    @ui.page("/curves")
    def curves(request: Request) -> None:
        names = request.query_params.getlist("run")
        if len(names) != 1:
            CurvesPage(runs, request)
        elif (found := find_run(runs, names[0])) is not None:
            CurvesPage(runs, request, found)


def read_options(query: Any) -> CurveOptions:
    """The options that an address names; what is not valid has its default."""
    axis: Axis = query.get("axis") if query.get("axis") in get_args(Axis) else "steps"
    found = re.fullmatch(r"0?\.\d{1,3}", query.get("smoothing", ""))
    switches = {name: query.get(name, "") for name in _SWITCHES}
    given = {name: value == "1" for name, value in switches.items() if value in ("0", "1")}
    return CurveOptions(axis=axis, smoothing=min(float(found[0]), 0.98) if found else 0.0, **given)


def write_query(names: list[str], metrics: list[str], options: CurveOptions) -> str:
    """The query of an address; defaults are left out."""
    pairs = [*(("run", name) for name in names), *(("metric", each) for each in metrics)]
    default = asdict(CurveOptions())
    for key, value in asdict(options).items():
        if value != default[key]:
            pairs.append((key, str(int(value)) if isinstance(value, bool) else f"{value}"))
    return urlencode(pairs)


class CurvesPage:
    """One viewer's page, of all runs or of one run that may be compared with others."""

    def __init__(self, runs: Runs, request: Request, run: Run | None = None) -> None:
        self._runs, self._run = runs, run
        self._charts: dict[str, ui.echart] = {}
        self._drawn: object = None
        self._listed: object = None
        self._version = -1
        query = request.query_params
        self._metrics = query.getlist("metric")[:_MAX_METRICS] or [SCORE]
        options = read_options(query)
        runs.attend("table", "")
        with frame(runs, run, "curves"):
            with card("Runs") if run is None else _closed("Compare with other runs"):
                self._add_runs()
            with card("Curves"):
                self._add_options(options)
                self._places = ui.element("div").classes("grid")
                self._hint = ui.label().classes("muted")
            self._chooser = None if run else _closed("Choose metrics")
            with self._chooser or card("Metrics", "choose what is drawn"):
                self._add_metrics()
            if self._chooser is not None:
                self._chooser.on_value_change(self.refresh)
        self._choose(query.getlist("run"))
        keep_fresh(self.refresh, _REFRESH_SECONDS)

    def _add_runs(self) -> None:
        with ui.element("div").classes("row-of finder"):
            search = search_box("filter: words of any column", label="filter")
            self._count = ui.label().classes("muted small")
        self._table = table(
            _LABELS,
            phone=("name", "state", "score"),
            numbers=("seed", "step", "score", "rate", "hours"),
            formats={"seed": "v => v", "hours": "v => dreamfleet.hours(v)"},
            search=search,
            selection="multiple",
            on_select=self.draw,
        )
        self._table.add_slot("body-cell-name", _NAME_CELL)
        self._table.add_slot("body-cell-state", dot_cell("alert"))

    def _add_options(self, options: CurveOptions) -> None:
        with ui.element("div").classes("row-of options"):
            self._axis = ui.toggle(list(AXES), value=options.axis, on_change=self.draw)
            self._axis.props("dense no-caps unelevated")
            with ui.element("label").classes("slider"):
                ui.label("smoothing").classes("muted small")
                self._smoothing = ui.slider(min=0, max=0.98, step=0.02, value=options.smoothing)
                self._smoothing.props('dense aria-label="smoothing"')
                self._smoothing.on("change", lambda: self.draw())
            self._switches = {
                name: ui.switch(label, value=getattr(options, name), on_change=self.draw)
                for name, label in _SWITCHES.items()
            }
            ui.element("div").classes("space")
            for text, act in (("Differences", self._differences), ("CSV", self._csv)):
                ui.button(text, on_click=act).props("flat dense no-caps")

    def _add_metrics(self) -> None:
        with ui.element("div").classes("row-of finder"):
            search = search_box("search names and meanings")
            self._reading = ui.label().classes("muted small")
        self._list = table(
            {"name": "metric", "newest": "newest", "meaning": "meaning", "section": "section"},
            phone=("name", "newest"),
            numbers=("newest",),
            search=search,
            selection="multiple",
        )
        self._list.classes("metrics").props("wrap-cells")
        self._list.on("selection", self._select_metrics)

    def _choose(self, names: list[str]) -> None:
        """Choose the runs of the address, or else those of the task that changed last."""
        found = [run for name in names if (run := self._runs.find(name)) is not None]
        if not names:
            scored = [run for run in self._runs.all() if run.row.score is not None]
            found = [run for run in scored if run.row.task == scored[0].row.task][:_FIRST_RUNS]
        self._table.selected = [run.row.to_dict() for run in found]

    @property
    def _chosen(self) -> list[Run]:
        names = [str(row["name"]) for row in self._table.selected][:_MAX_RUNS]
        return [run for name in names if (run := self._runs.find(name)) is not None]

    @property
    def _options(self) -> CurveOptions:
        switches = {name: bool(switch.value) for name, switch in self._switches.items()}
        smoothing = round(float(self._smoothing.value), 2)
        return CurveOptions(axis=self._axis.value, smoothing=smoothing, **switches)

    def refresh(self) -> None:
        """Show what has changed."""
        self._runs.attend("table", "")
        chosen = self._chosen
        lists = self._chooser is None or bool(self._chooser.value)
        needs_metrics = lists or not set(self._metrics) <= {SCORE, EVALUATION}
        self._runs.attend("metrics" if needs_metrics else "scores", *(run.name for run in chosen))
        if self._run is not None:
            self._runs.attend("live", self._run.name)
        if self._version != self._runs.version:
            self._version = self._runs.version
            rows = [run.row.to_dict() for run in self._runs.all()]
            self._table.rows = rows
            running = sum(run.row.running for run in self._runs.all())
            self._count.text = f"{len(rows)} runs" + (f", {running} running" if running else "")
        if lists:
            self._list_metrics(chosen)
        self.draw()

    def _list_metrics(self, chosen: list[Run]) -> None:
        versions = [(run.name, run.version(SCORE), run.metrics.rows) for run in chosen]
        if versions == self._listed:
            return
        self._listed = versions
        names = {SCORE, EVALUATION}
        for run in chosen:
            with run.lock:
                names |= {*run.metrics.newest, *run.metrics.texts}
        order = sorted(names, key=lambda name: (name not in (SCORE, EVALUATION), name))
        rows = {name: _metric_row(name, chosen[0]) for name in order if chosen}
        self._list.rows = list(rows.values())
        self._list.selected = [rows[name] for name in self._metrics if name in rows]
        behind = any(run.metrics.behind for run in chosen)
        self._reading.text = f"{len(rows)} metrics{', reading…' if behind else ''}"

    def _select_metrics(self, event: GenericEventArguments) -> None:
        names = [str(row["name"]) for row in event.args["rows"]]
        kept = [name for name in self._metrics if name not in names]
        self._metrics = ([*kept, *names] if event.args["added"] else kept)[-_MAX_METRICS:]
        self._listed = None
        self.refresh()

    def _panels(self) -> list[tuple[str, Panel]]:
        chosen, options = self._chosen, self._options
        return [(name, each) for name in self._metrics for each in panels(chosen, name, options)]

    def draw(self) -> None:
        """Draw the chosen runs and metrics, if something has changed."""
        chosen, options = self._chosen, self._options
        versions = [(run.name, run.version(m)) for run in chosen for m in self._metrics]
        drawn = (versions, tuple(self._metrics), options)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        found = {f"{metric} · {panel.task}": (metric, panel) for metric, panel in self._panels()}
        self._hint.text = missing_hours(chosen, options) or ("" if found else _hint(chosen))
        for title in set(self._charts) - set(found):
            self._charts.pop(title).parent_slot.parent.delete()  # type: ignore[union-attr]
        for title, (metric, panel) in found.items():
            place = card(title, meaning(metric), within=self._places)
            draw(self._charts, title, panel_chart(panel, metric, options), place, "chart tall")
        query = write_query([run.name for run in chosen], self._metrics, options)
        ui.run_javascript(f"history.replaceState(null, '', '?{query}')")

    def _csv(self) -> None:
        ui.download.content(to_csv(self._panels(), self._options), "curves.csv")

    def _differences(self) -> None:
        chosen = [run for run in self._chosen if run.config is not None][:6]
        flat = [run.config.flat() for run in chosen if run.config is not None]
        rows = [
            {"name": key, **{f"run{n}": str(each.get(key, "")) for n, each in enumerate(flat)}}
            for key in differing(flat)
            if key != "logdir"
        ]
        with ui.dialog() as dialog, card("Settings that differ"):
            if len(chosen) < 2 or not rows:
                text = "The settings are the same." if len(chosen) > 1 else "Choose two runs."
                ui.label(text).classes("muted")
            else:
                labels = {"name": "setting"} | {f"run{n}": r.name for n, r in enumerate(chosen)}
                table(labels, phone=labels, rows=rows)
        dialog.on("hide", dialog.delete)
        dialog.open()


def _closed(title: str) -> ui.expansion:
    return ui.expansion(title).classes("card closed")


_explain = lru_cache(4096)(explain)


def meaning(metric: str) -> str:
    """What a metric means; empty if it is not one of ours."""
    if metric == EVALUATION:
        return "mean return of each evaluation"
    entry = _explain(metric)
    return entry.sentence.replace("`", "") if entry else ""


def _metric_row(name: str, run: Run) -> dict[str, Any]:
    """A row of the table of metrics, with the newest value of a run."""
    entry = _explain(name)
    value: float | str | None = run.metrics.texts.get(name)
    if value is None:
        value = run.row.score if name == SCORE else run.newest(name)
    if value is None and name in run.metrics.newest:
        value = "not finite"
    shown = readable(float(f"{value:.4g}")) if isinstance(value, float) else value
    section = entry.section if entry else ""
    return {"name": name, "newest": shown, "meaning": meaning(name), "section": section}


def _hint(chosen: list[Run]) -> str:
    if not chosen:
        return "Choose runs in the table to draw them."
    behind = any(run.scores.behind or run.metrics.behind for run in chosen)
    return "Reading…" if behind else "The runs have not logged this yet."
