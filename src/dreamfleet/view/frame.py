"""What pages share: the head, the pages of a run (`RunPage`), cards, tables and charts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import resources
from typing import Any, ClassVar
from urllib.parse import urlencode

from nicegui import ui

from dreamfleet.view.runs import Run, Runs

_FIRST_REFRESH_SECONDS = 0.4

RUN_PAGES: dict[str, str] = {
    "run": "Overview",
    "curves": "Curves",
    "fleet": "Fleet",
    "logs": "Logs",
    "checkpoints": "Checkpoints",
    "configuration": "Configuration",
    "videos": "Videos",
    "dream": "Dream",
}
"""Titles of a run's pages by their path."""


def add_style() -> None:
    """Add the style and the script of all pages."""
    files = resources.files("dreamfleet.view")
    ui.add_css((files / "style.css").read_text(), shared=True)
    ui.add_head_html(f"<script>{(files / 'script.js').read_text()}</script>", shared=True)


def link_to(page: str, run: Run, **query: str) -> str:
    """The address of a page of a run."""
    return f"/{page}?{urlencode({'run': run.name, **query})}"


@contextmanager
def frame(runs: Runs, run: Run | None = None, page: str = "") -> Iterator[None]:
    """A page: the head, then what the block adds."""
    ui.page_title(f"{run.name} · dreamfleet" if run else "dreamfleet")
    with ui.element("header").classes("head"):
        ui.link("", "/").classes("mark").props('aria-label="all runs"')
        if not runs.single or run is None:
            ui.link(runs.root.name or "runs", "/").classes("place")
            ui.label("/" if run else "").classes("muted")
        if run is not None:
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
        if run is not None:
            _add_alert(run)
        yield


def _add_alert(run: Run) -> None:
    """A banner for a failed process, a loss that is not finite, or a stall."""
    banner = ui.label().classes("alert").props("role=alert")

    def refresh() -> None:
        failed = ", ".join(sorted(run.recently_failed))
        text = run.row.alert or (f"{failed} failed, and is restarted." if failed else "")
        banner.set_text(text)
        banner.set_visibility(bool(text))

    keep_fresh(refresh, 1.0)


@contextmanager
def card(
    title: str = "", note: str = "", *, within: ui.element | None = None, link: str = ""
) -> Iterator[ui.element]:
    """A box with a title, which may be a link; what the block adds is inside."""
    with within or nullcontext(), ui.element("section").classes("card") as box:
        if title:
            with ui.element("div").classes("card-head"):
                (ui.link(title, link) if link else ui.label(title)).classes("card-title")
                ui.label(note).classes("muted small")
        yield box


def keep_fresh(refresh: Callable[[], object], seconds: float) -> None:
    """Refresh now, once more when the runs have been read, and then every few seconds."""
    refresh()
    ui.timer(_FIRST_REFRESH_SECONDS, refresh, once=True, immediate=False)
    ui.timer(seconds, refresh, immediate=False)


class RunPage(ABC):
    """A page about a run, for one viewer."""

    path: ClassVar[str]
    """A key of `RUN_PAGES`."""
    seconds: ClassVar[float] = 0.0
    """Between two refreshes; 0 for a page that does not change."""

    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        runs.attend("live", run.name)
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
        """Add the elements of the page."""

    def refresh(self) -> None:  # noqa: B027 - a page need not change
        """Show what has changed."""

    def _refresh(self) -> None:
        self._runs.attend("live", self._run.name)
        self.refresh()


def find_run(runs: Runs, name: str) -> Run | None:
    """The run of a page; if it is missing, the page says so."""
    run = runs.find(name) if name else next(iter(runs.all()), None) if runs.single else None
    if run is None:
        with frame(runs), card("No such run"):
            ui.label(f"This folder holds no run {name!r}.").classes("muted")
    return run


def draw(
    charts: dict[str, ui.echart],
    name: str,
    options: dict[str, Any],
    place: AbstractContextManager[object],
    kind: str = "chart",
) -> None:
    """Create a chart in its place, or update it without changing its zoom."""
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
    """A field for words to search."""
    box = ui.input(placeholder=hint, on_change=changed).classes("search")
    return box.props(f'outlined dense clearable debounce="200" aria-label="{label}"')


_FILTER = (
    "(rows, words) => rows.filter(row => words.toLowerCase().split(/\\s+/).every("
    "word => Object.values(row).some(value => String(value).toLowerCase().includes(word))))"
)


def table(
    labels: Mapping[str, str],
    *,
    phone: Collection[str],
    numbers: Collection[str] = (),
    formats: Mapping[str, str] | None = None,
    key: str = "name",
    search: ui.input | None = None,
    **more: Any,
) -> ui.table:
    """A table that sorts by any column.

    Args:
        labels: Titles of the columns by name.
        phone: Columns that a narrow screen shows.
        numbers: Columns that are aligned right and shortened.
        formats: JavaScript functions that format columns.
        key: The column that names a row.
        search: A field; rows that lack one of its words are hidden.
        more: Arguments of `ui.table`.
    """
    short = dict.fromkeys(numbers, "v => typeof v === 'number' ? dreamfleet.short(v) : v")
    formatted = {**short, **(formats or {})}
    columns = [
        {
            "name": name,
            "label": label,
            "field": name,
            "sortable": bool(label),
            "align": "right" if name in numbers else "left",
            "classes": f"col-{name}" if name in phone else f"col-{name} wide-only",
            "headerClasses": "" if name in phone else "wide-only",
            **({":format": formatted[name]} if name in formatted else {}),
        }
        for name, label in labels.items()
    ]
    made = ui.table(rows=more.pop("rows", []), columns=columns, row_key=key, **more)
    made.classes("runs").props(
        'flat dense virtual-scroll :rows-per-page-options="[0]" binary-state-sort hide-bottom'
    )
    if search is not None:
        made.props[":filter-method"] = _FILTER
        made.bind_filter_from(search, "value", lambda words: words or "")
    return made


def dot_cell(title: str) -> str:
    """The template of a table's cell that shows a state and its colour. Values of runs are text
    or attributes, never markup."""
    return (
        f'<q-td :props="props" :title="props.row.{title}"><span class="dot" :class="props.value">'
        f'</span>{{{{ props.value }}}}<span v-if="props.row.{title}" class="warn"> ⚠</span></q-td>'
    )


def with_hint(text: str) -> str:
    """An error, and how to allow code that a run names."""
    if "not part of Dreamfleet" not in text:
        return text
    return f"{text} If you trust the code that your runs name, start 'dreamfleet view --trust'."
