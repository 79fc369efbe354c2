"""The table of runs, and those that are chosen in it drawn together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nicegui import ui

from dreamfleet.plotting import differing
from dreamfleet.view.charts import AXES, CurveOptions, panel_chart, panels, to_csv, undrawn
from dreamfleet.view.frame import (
    card,
    columns,
    draw,
    find_run,
    frame,
    keep_fresh,
    search_box,
    smoothing_slider,
)
from dreamfleet.view.run_page import OverviewPage
from dreamfleet.view.runs import Run, Runs

_REFRESH_SECONDS = 2.0
_MOST_CHOSEN = 60
_FIRST_CHOSEN = 8

_NAMES = ("name", "task", "preset", "seed", "state", "step", "score", "rate", "hours", "machine")
_LABELS = {**{name: name for name in _NAMES}, "name": "run", "rate": "steps/s", "hours": "time"}
# Values of runs are text or attributes here, never markup.
_NAME_CELL = """<q-td :props="props"><a :href="'/run?run=' + encodeURIComponent(props.row.name)"
 :title="props.row.name" @click.stop>{{ props.row.name }}</a></q-td>"""
_STATE_CELL = """<q-td :props="props" :title="props.row.problem">
<span class="dot" :class="props.value"></span>{{ props.value }}</q-td>"""


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/")
    def page() -> None:
        if not runs.alone:
            _Table(runs)
        elif (found := find_run(runs, "")) is not None:
            OverviewPage(runs, found)


class _Table:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._drawn: object = None
        self._version = -1
        self._charts: dict[str, ui.echart] = {}
        runs.attend()
        with frame(runs):
            with card("Runs") as box:
                self._add_table()
            box.classes("table-card")
            with card("Chosen runs"):
                self._add_wishes()
                self._places = ui.element("div").classes("grid")
                self._hint = ui.label().classes("muted")
        self._choose_first()
        keep_fresh(self.refresh, _REFRESH_SECONDS)

    def _add_table(self) -> None:
        numbers = ("seed", "step", "score", "rate", "hours")
        formats = {"seed": "v => v", "hours": "v => dreamfleet.hours(v)"}
        shown = columns(_LABELS, phone=("name", "state", "score"), numbers=numbers, formats=formats)
        with ui.element("div").classes("row-of finder"):
            search = search_box("filter: words of any column", label="filter")
            self._count = ui.label().classes("muted small")
        self._table = ui.table(
            rows=[], columns=shown, row_key="name", selection="multiple", on_select=self.draw
        )
        self._table.classes("runs").props(
            'flat dense virtual-scroll :rows-per-page-options="[0]" binary-state-sort hide-bottom'
        )
        self._table.props[":filter-method"] = (
            "(rows, words) => rows.filter(row => words.toLowerCase().split(/\\s+/).every("
            "word => Object.values(row).some(value => String(value).toLowerCase().includes(word))))"
        )
        self._table.bind_filter_from(search, "value", lambda words: words or "")
        self._table.add_slot("body-cell-name", _NAME_CELL)
        self._table.add_slot("body-cell-state", _STATE_CELL)

    def _add_wishes(self) -> None:
        with ui.element("div").classes("row-of wishes"):
            self._axis = ui.toggle(list(AXES), value="steps", on_change=self.draw)
            self._axis.props("dense no-caps unelevated")
            self._smoothing = smoothing_slider(self.draw)
            self._log = ui.switch("log", on_change=self.draw).props("dense")
            self._together = ui.switch("join seeds", value=True, on_change=self.draw).props("dense")
            self._published = ui.switch("published", value=True, on_change=self.draw).props("dense")
            self._evaluations = ui.switch("evaluations", on_change=self.draw).props("dense")
            ui.element("div").classes("space")
            ui.button("Differences", on_click=self._differences).props("flat dense no-caps")
            ui.button("CSV", on_click=self._csv).props("flat dense no-caps")

    def _choose_first(self) -> None:
        """At first: runs of the task that last gave a sign of life."""
        everything = self._runs.all()
        tasks = [run.row.task for run in everything if run.row.score is not None]
        mine = [run for run in everything if tasks and run.row.task == tasks[0]]
        self._table.selected = [_plain(run) for run in mine[:_FIRST_CHOSEN]]

    @property
    def _chosen(self) -> list[Run]:
        names = [row["name"] for row in self._table.selected][:_MOST_CHOSEN]
        return [run for name in names if (run := self._runs.find(str(name))) is not None]

    @property
    def _wish(self) -> CurveOptions:
        return CurveOptions(
            axis=self._axis.value,
            smoothing=float(self._smoothing.value),
            together=bool(self._together.value),
            evaluations=bool(self._evaluations.value),
        )

    def refresh(self) -> None:
        """Show what has changed."""
        self._runs.attend(drawn=[run.name for run in self._chosen])
        if self._version != self._runs.version:
            self._version = self._runs.version
            rows = [_plain(run) for run in self._runs.all()]
            self._table.rows = rows
            running = sum(run.row.running for run in self._runs.all())
            self._count.text = f"{len(rows)} runs" + (f", {running} under way" if running else "")
        self.draw()

    def draw(self) -> None:
        """Draw the chosen runs, if anything in the picture has changed."""
        chosen, wish = self._chosen, self._wish
        log, published = bool(self._log.value), bool(self._published.value)
        drawn = ([(run.name, run.drawn) for run in chosen], wish, log, published)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._runs.attend(drawn=[run.name for run in chosen])
        found = panels(chosen, wish)
        self._hint.text = undrawn(chosen, wish) or ("" if found else _hint(chosen))
        wanted = {panel.task for panel in found}
        for task in set(self._charts) - wanted:
            self._charts.pop(task).parent_slot.parent.delete()  # type: ignore[union-attr]
        for panel in found:
            options = panel_chart(panel, wish, published=published, log=log)
            draw(self._charts, panel.task, options, self._place(panel.task), "chart tall")

    @contextmanager
    def _place(self, task: str) -> Iterator[None]:
        with self._places, ui.element("div"):
            ui.label(task).classes("card-title")
            yield

    def _csv(self) -> None:
        ui.download.content(to_csv(panels(self._chosen, self._wish), self._wish), "curves.csv")

    def _differences(self) -> None:
        chosen = [run for run in self._chosen if run.config is not None]
        with ui.dialog() as dialog, card("Settings that differ"):
            if len(chosen) < 2:
                ui.label("Choose two runs or more.").classes("muted")
            else:
                _difference_table(chosen[:6])
        dialog.on("hide", dialog.delete)
        dialog.open()


def _difference_table(chosen: list[Run]) -> None:
    flat = [run.config.flat() for run in chosen if run.config is not None]
    rows = [
        {"setting": key, **{f"run{n}": str(each.get(key, "")) for n, each in enumerate(flat)}}
        for key in differing(flat)
        if key != "logdir"
    ]
    labels = {"setting": "setting", **{f"run{n}": run.name for n, run in enumerate(chosen)}}
    if rows:
        shown = columns(labels, phone=labels)
        ui.table(rows=rows, columns=shown, row_key="setting").classes("runs").props("flat")
    else:
        ui.label("They have the same settings.").classes("muted")


def _hint(chosen: list[Run]) -> str:
    if not chosen:
        return "Choose runs in the table to draw them here."
    if any(run.row.score is not None for run in chosen):
        return "Reading…"
    return "No episode of these runs has ended yet."


def _plain(run: Run) -> dict[str, Any]:
    row = asdict(run.row)
    del row["changed"]
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}
