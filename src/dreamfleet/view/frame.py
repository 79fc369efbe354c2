"""What every page has around it: the head with the way back, and the pages of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import resources
from typing import Any, ClassVar
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
    """A page: the head, then what the block adds."""
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
def card(
    title: str = "", note: str = "", *, within: ui.element | None = None
) -> Iterator[ui.element]:
    """A box with a title, here or within something else; what the block adds is inside."""
    with within or nullcontext(), ui.element("section").classes("card") as box:
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


class RunPage(ABC):
    """A page about a run, for one viewer."""

    path: ClassVar[str]
    """A key of `RUN_PAGES`, and the address."""
    seconds: ClassVar[float] = 0.0
    """Between two looks; 0 for a page that does not change."""

    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        runs.attend(run.name)
        with frame(runs, run, self.path):
            self.build()
        if self.seconds:
            keep_fresh(self._refresh, self.seconds)

    @classmethod
    def add(cls, runs: Runs) -> None:
        """Add the page to the server."""

        @ui.page(f"/{cls.path}")
        def page(run: str = "") -> None:
            if (found := find_run(runs, run)) is not None:
                cls(runs, found)

    @abstractmethod
    def build(self) -> None:
        """Add what is on the page."""

    def refresh(self) -> None:  # noqa: B027 - a page need not change
        """Show what has changed."""

    def _refresh(self) -> None:
        self._runs.attend(self._run.name)
        self.refresh()


def draw(
    charts: dict[str, ui.echart],
    name: str,
    options: dict[str, Any],
    place: AbstractContextManager[object],
    kind: str = "chart",
) -> None:
    """Draw a chart, which is made in its place the first time. Later it is changed, so that it
    stays where a person has zoomed to."""
    if name in charts:
        charts[name].options.clear()
        charts[name].options.update(options)
        charts[name].update()
    else:
        with place:
            charts[name] = ui.echart(options).classes(kind)


def search_box(
    hint: str, changed: Callable[[], object] | None = None, label: str = "search"
) -> ui.input:
    """Where a person types what to look for."""
    box = ui.input(placeholder=hint, on_change=changed).classes("search")
    return box.props(f'outlined dense clearable debounce="200" aria-label="{label}"')


def columns(
    labels: Mapping[str, str],
    *,
    phone: Collection[str],
    numbers: Collection[str] = (),
    formats: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Columns of a table.

    Args:
        labels: What stands above them, by name.
        phone: Those that are also shown where there is little room.
        numbers: Those that are aligned to the right, and shortened.
        formats: Functions in JavaScript for some of them instead.
    """
    short = dict.fromkeys(numbers, "v => typeof v === 'number' ? dreamfleet.short(v) : v")
    formatted = {**short, **(formats or {})}
    return [
        {
            "name": name,
            "label": label,
            "field": name,
            "sortable": True,
            "align": "right" if name in numbers else "left",
            "classes": f"col-{name}" if name in phone else f"col-{name} wide-only",
            "headerClasses": "" if name in phone else "wide-only",
            **({":format": formatted[name]} if name in formatted else {}),
        }
        for name, label in labels.items()
    ]


def smoothing_slider(changed: Callable[[], object]) -> ui.slider:
    """How much curves are smoothed."""
    with ui.element("label").classes("slider"):
        ui.label("smoothing").classes("muted small")
        slider = ui.slider(min=0, max=0.98, step=0.02, value=0)
        return slider.props('dense aria-label="smoothing"').on("change", lambda: changed())


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
