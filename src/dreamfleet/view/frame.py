"""What every page has around it: the head with the way back, and the pages of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any
from urllib.parse import quote

from nicegui import ui

from dreamfleet.view.runs import Run, Runs

_SOON = 0.4

RUN_PAGES: dict[str, str] = {
    "run": "Overview",
    "metrics": "Metrics",
    "fleet": "Fleet",
    "logs": "Logs",
    "checkpoints": "Checkpoints",
    "configuration": "Configuration",
    "look": "Look",
    "dream": "Dream",
}
"""Pages of a run, by their path, in the order in which they are shown."""


def add_style() -> None:
    """Colours and small functions of all pages."""
    files = resources.files("dreamfleet.view")
    ui.add_css((files / "style.css").read_text(), shared=True)
    script = (files / "script.js").read_text()
    ui.add_head_html(f"<script>{script}</script>", shared=True)


def link_to(page: str, run: Run) -> str:
    """The address of a page of a run."""
    return f"/{page}?run={quote(run.name, safe='')}"


@contextmanager
def frame(runs: Runs, run: Run | None = None, page: str = "") -> Iterator[None]:
    """A page: the head, then what the block adds.

    Args:
        runs: All of them.
        run: The one that the page is about.
        page: Its path, a key of `RUN_PAGES`.
    """
    ui.page_title(f"{run.name} · dreamfleet" if run else "dreamfleet")
    with ui.element("header").classes("head"):
        ui.link("", "/").classes("mark").props('aria-label="all runs"')
        if runs.alone and run is not None:
            ui.label(run.name).classes("place")
        else:
            ui.link(runs.root.name or "runs", "/").classes("place")
            if run is not None:
                ui.label("/").classes("muted")
                ui.label(run.name).classes("place strong")
        ui.element("div").classes("space")
        ui.element("button").classes("shade").props('aria-label="light or dark"').on(
            "click", js_handler="() => dreamfleet.shade()"
        )
    if run is not None:
        with ui.element("nav").classes("pages"):
            for path, title in RUN_PAGES.items():
                link = ui.link(title, link_to(path, run))
                if path == page:
                    link.classes("here").props('aria-current="page"')
    with ui.element("main").classes("body"):
        yield


@contextmanager
def card(title: str = "", note: str = "") -> Iterator[ui.element]:
    """A box with a title; what the block adds is inside."""
    with ui.element("section").classes("card") as box:
        if title:
            with ui.element("div").classes("card-head"):
                ui.label(title).classes("card-title")
                if note:
                    ui.label(note).classes("muted small")
        yield box


def keep_fresh(refresh: Callable[[], object], seconds: float) -> None:
    """Show what there is, and then again and again what is new. The thread that looks at the runs
    has found something a moment after the page was asked for."""
    refresh()
    ui.timer(_SOON, refresh, once=True, immediate=False)
    ui.timer(seconds, refresh, immediate=False)


def replace_options(chart: ui.echart, options: dict[str, Any]) -> None:
    """Draw something else in a chart; where a person has zoomed to stays."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def with_hint(text: str) -> str:
    """What was refused, and where a person says that it may be: a page cannot ask for it."""
    if "not part of Dreamfleet" not in text:
        return text
    return f"{text} If you trust the code that your runs name, start 'dreamfleet view --trust'."


def find_run(runs: Runs, name: str) -> Run | None:
    """The run that a page was asked for; without one the page says so."""
    run = runs.find(name) if name else next(iter(runs.all()), None) if runs.alone else None
    if run is None:
        with frame(runs), card("There is no such run"):
            ui.label(f"There is no run {name!r} in this folder, or not any more.").classes("muted")
    return run
