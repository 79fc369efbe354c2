"""The table of runs, and any metric of any runs as curves. The address holds what is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import msgspec
from fastapi import Request
from nicegui import ui
from nicegui.events import GenericEventArguments

from dreamfleet.formatting import readable
from dreamfleet.metrics.glossary import explain
from dreamfleet.plotting import Panel, differing
from dreamfleet.view.charts import AXES, CurveOptions, missing_hours, panel_chart, panels, to_csv
from dreamfleet.view.frame import (
    NAME_CELL,
    card,
    draw,
    find_run,
    frame,
    keep_fresh,
    page,
    search_box,
    set_rows,
    show_run,
    table,
)
from dreamfleet.view.overview_page import build_overview
from dreamfleet.view.runs import EVALUATION, SCORE, Run, Runs
from dreamfleet.view.sweep_page import add_links

_REFRESH_SECONDS = 2.0
_MAX_RUNS, _FIRST_RUNS, _MAX_METRICS, _MAX_COMPARED = 40, 8, 12, 6
_NAMES = ("name", "task", "preset", "seed", "state", "step", "score", "rate", "hours", "machine")
_LABELS = {name: name for name in (*_NAMES, "tags", "note")}
_LABELS |= {"name": "run", "rate": "steps/s", "hours": "time"}
_SWITCHES = {"log": "log", "join_seeds": "join seeds", "interval": "95 % interval"}
_SWITCHES |= {"published": "published"}


def add(runs: Runs) -> None:
    """Add the first page, and the page of curves."""

    @page("/")
    async def _(request: Request) -> None:
        if runs.single:
            await show_run(runs, "", "run", build_overview, 1.0)
        else:
            await _show(runs, request, None)

    @page("/curves")
    async def _(request: Request) -> None:
        names = request.query_params.getlist("run")
        run = find_run(runs, names[0]) if len(names) == 1 else None
        if run is not None or len(names) != 1:
            await _show(runs, request, run)


async def _show(runs: Runs, request: Request, run: Run | None) -> None:
    with frame(runs, run, "curves") as head:
        shown = CurvesPage(runs, request.query_params, run)
    await keep_fresh(shown.update, head, shown.refresh, seconds=_REFRESH_SECONDS)


def read_options(query: Mapping[str, str]) -> CurveOptions:
    """The options that an address names; what is not valid has its default."""
    options = CurveOptions()
    for name in asdict(options).keys() & query.keys():
        with suppress(msgspec.ValidationError):
            given = {**asdict(options), name: query[name]}
            options = msgspec.convert(given, CurveOptions, strict=False)
    return options


def write_query(names: list[str], metrics: list[str], options: CurveOptions) -> str:
    """The query of an address; defaults are left out."""
    pairs = [*(("run", name) for name in names), *(("metric", each) for each in metrics)]
    default = asdict(CurveOptions())
    changed = {key: value for key, value in asdict(options).items() if value != default[key]}
    plain = {key: int(v) if isinstance(v, bool) else v for key, v in changed.items()}
    return urlencode([*pairs, *plain.items()])


class CurvesPage:
    """One viewer's page, of all runs or of one run that may be compared with others."""

    def __init__(self, runs: Runs, query: Any, run: Run | None) -> None:
        self._runs = runs
        self._charts: dict[str, ui.echart] = {}
        self._drawn: object = None
        self._metrics: list[str] = query.getlist("metric")[:_MAX_METRICS] or [SCORE]
        with _fold("Runs" if run is None else "Compare with other runs", is_open=run is None):
            self._add_runs()
        with card("Curves"):
            self._add_options(read_options(query))
            self._places = ui.element("div").classes("grid")
            self._hint = ui.label().classes("muted")
        with _fold("Choose metrics", is_open=run is not None) as self._chooser:
            self._add_metrics()
        self._chooser.on_value_change(self.refresh)
        self._choose(query.getlist("run"))

    def _add_runs(self) -> None:
        with ui.element("div").classes("row-of finder"):
            search = search_box("filter: words of any column", label="filter")
            self._count = ui.label().classes("muted small")
            add_links(self._runs)
        self._table = table(
            _LABELS,
            phone=("name", "state", "score"),
            numbers=("seed", "step", "score", "rate", "hours"),
            formats={"seed": "v => v", "hours": "v => dreamfleet.hours(v)"},
            search=search,
            selection="multiple",
            on_select=self.draw,
        )
        self._table.add_slot("body-cell-name", NAME_CELL)

    def _add_options(self, options: CurveOptions) -> None:
        with ui.element("div").classes("row-of options"):
            self._axis = ui.toggle(list(AXES), value=options.axis, on_change=self.draw)
            self._axis.props("dense no-caps unelevated")
            with ui.element("label").classes("slider"):
                ui.label("smoothing").classes("muted small")
                self._smoothing = ui.slider(min=0, max=0.98, step=0.02, value=options.smoothing)
                self._smoothing.props('dense aria-label="smoothing"').on("change", self.draw)
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
        self._list.classes("metrics").props("wrap-cells").on("selection", self._select_metrics)

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

    def update(self) -> None:
        """Read what the page shows."""
        metrics = bool(self._chooser.value) or not set(self._metrics) <= {SCORE, EVALUATION}
        self._runs.update(*self._chosen, metrics=metrics)

    def refresh(self) -> None:
        """Show what has changed."""
        rows = [run.row for run in self._runs.all()]
        set_rows(self._table, [row.to_dict() for row in rows])
        running = sum(row.running for row in rows)
        count = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
        self._count.text = f"{count}, {running} running" if running else count
        if self._chooser.value and (chosen := self._chosen):
            self._list_metrics(chosen)
        self.draw()

    def _list_metrics(self, chosen: list[Run]) -> None:
        names = {SCORE, EVALUATION}
        for run in chosen:
            with run.lock:
                names |= {*run.metrics.newest, *run.metrics.texts}
        order = sorted(names, key=lambda name: (name not in (SCORE, EVALUATION), name))
        rows = {name: _metric_row(name, chosen[0]) for name in order}
        set_rows(self._list, list(rows.values()))
        selected = [rows[name] for name in self._metrics if name in rows]
        if self._list.selected != selected:
            self._list.selected = selected
        behind = any(run.metrics.behind for run in chosen)
        self._reading.text = f"{len(rows)} metrics{', reading…' if behind else ''}"

    def _select_metrics(self, event: GenericEventArguments) -> None:
        names = [str(row["name"]) for row in event.args["rows"]]
        kept = [name for name in self._metrics if name not in names]
        self._metrics = ([*kept, *names] if event.args["added"] else kept)[-_MAX_METRICS:]
        self.refresh()

    def _panels(self) -> list[tuple[str, Panel]]:
        chosen, options = self._chosen, self._options
        return [(name, each) for name in self._metrics for each in panels(chosen, name, options)]

    def draw(self) -> None:
        """Draw the chosen runs and metrics, if something has changed."""
        chosen, options = self._chosen, self._options
        drawn = ([(run.name, run.version) for run in chosen], tuple(self._metrics), options)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        found = {f"{metric} · {panel.task}": (metric, panel) for metric, panel in self._panels()}
        self._hint.text = missing_hours(chosen, options) or ("" if found else _hint(chosen))
        for title in set(self._charts) - set(found):
            self._charts.pop(title).parent_slot.parent.delete()  # type: ignore[union-attr]
        for title, (metric, panel) in found.items():
            chart = panel_chart(panel, metric, options)
            place = card(title, meaning(metric), self._places)
            draw(self._charts, title, chart.options, place, "chart tall")
        query = write_query([run.name for run in chosen], self._metrics, options)
        ui.run_javascript(f"history.replaceState(null, '', '?{query}')")

    def _csv(self) -> None:
        ui.download.content(to_csv(self._panels(), self._options), "curves.csv")

    def _differences(self) -> None:
        configs = {run.name: run.config.flat() for run in self._chosen if run.config is not None}
        shown = dict(list(configs.items())[:_MAX_COMPARED])
        # Columns have numbers, because the library gives names of columns a meaning.
        rows = [
            {"name": key, **{f"run{n}": str(each.get(key, "")) for n, each in enumerate(flat)}}
            for flat in [list(shown.values())]
            for key in differing(flat)
            if key != "logdir"
        ]
        with ui.dialog() as dialog, card("Settings that differ"):
            if rows:
                labels = {"name": "setting"} | {f"run{n}": name for n, name in enumerate(shown)}
                table(labels, phone=labels, rows=rows)
            else:
                text = "The settings are the same." if len(shown) > 1 else "Choose two runs."
                ui.label(text).classes("muted")
        dialog.on("hide", dialog.delete)
        dialog.open()


def _fold(title: str, *, is_open: bool) -> ui.expansion:
    return ui.expansion(title, value=is_open).classes("card fold")


def meaning(metric: str) -> str:
    """What a metric means; empty if it is not one of ours."""
    if metric == EVALUATION:
        return "mean return of each evaluation"
    entry = explain(metric)
    return entry.sentence.replace("`", "") if entry else ""


def _metric_row(name: str, run: Run) -> dict[str, Any]:
    """A row of the table of metrics, with the newest value of a run."""
    value = run.row.score if name == SCORE else run.newest(name)
    if name == EVALUATION and (means := run.points(EVALUATION)) is not None:
        value = float(means[-1, 1])
    shown = "not finite" if name in run.metrics.newest else ""
    shown = shown if value is None else readable(float(f"{value:.4g}"))
    entry = explain(name)
    about = {"meaning": meaning(name), "section": entry.section if entry else ""}
    return {"name": name, "newest": run.metrics.texts.get(name, shown), **about}


def _hint(chosen: list[Run]) -> str:
    if not chosen:
        return "Choose runs in the table to draw them."
    behind = any(run.scores.behind or run.metrics.behind for run in chosen)
    return "Reading…" if behind else "The runs have not logged this yet."
