"""What pages share: the head, the pages of a run, how they stay fresh, cards, tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from nicegui import run as threads
from nicegui import ui

from dreamfleet.view.runs import Run, Runs

Refresh = Callable[[], object]
"""Shows what has changed."""
_PAGES = ("run", "curves", "fleet", "logs", "checkpoints", "configuration", "videos", "dream")
"""The paths of a run's pages; the first one is the overview."""
_BUILD_SECONDS = 60.0
_FILTER = (
    "(rows, words) => rows.filter(row => words.toLowerCase().split(/\\s+/).every("
    "word => Object.values(row).some(value => String(value).toLowerCase().includes(word))))"
)
STATE_CELL = """<q-td :props="props" :title="props.row.alert"><span class="dot"
 :class="props.value"></span>{{ props.value }}<span v-if="props.row.alert" class="warn"> ⚠</span>
</q-td>"""
"""A state, its colour and an alert. Values of runs are text or attributes, never markup."""
NAME_CELL = """<q-td :props="props"><a :href="'/run?run=' + encodeURIComponent(props.row.name)"
 :title="props.row.name" @click.stop>{{ props.row.name }}</a></q-td>"""
"""A link to a run."""

page = partial(ui.page, response_timeout=_BUILD_SECONDS)


def add_style() -> None:
    """Add the style and the script of all pages."""
    files = resources.files("dreamfleet.view")
    ui.add_css((files / "style.css").read_text(), shared=True)
    ui.add_head_html(f"<script>{(files / 'script.js').read_text()}</script>", shared=True)


def link_to(path: str, run: Run, **query: str) -> str:
    """The address of a page of a run."""
    return f"/{path}?{urlencode({'run': run.name, **query})}"


@contextmanager
def frame(runs: Runs, run: Run | None = None, path: str = "") -> Iterator[Refresh]:
    """A page: the head, then what the block adds. Gives what refreshes its head."""
    ui.page_title(f"{run.name} · dreamfleet" if run else "dreamfleet")
    with ui.element("header").classes("head"):
        ui.link("", "/").classes("mark").props('aria-label="all runs"')
        if not runs.single or run is None:
            ui.link(runs.root.name or "runs", "/").classes("place")
            ui.label("/" if run else "").classes("muted")
        if run is not None:
            ui.label(run.name).classes("place strong")
        ui.element("div").classes("space")
        shade = ui.element("button").classes("shade").props('aria-label="light or dark"')
        shade.on("click", js_handler="() => dreamfleet.shade()")
    if run is not None:
        with ui.element("nav").classes("pages"):
            for each in _PAGES:
                link = ui.link("Overview" if each == "run" else each.title(), link_to(each, run))
                if each == path:
                    link.classes("here").props('aria-current="page"')
    with ui.element("main").classes("body"):
        banner = ui.label().classes("alert").props("role=alert")
        yield partial(_show_alert, banner, run)


def _show_alert(banner: ui.label, run: Run | None) -> None:
    """Show a failed process, a loss that is not finite, or a stall."""
    failed = ", ".join(sorted(run.recently_failed)) if run else ""
    alert = run.row.alert if run else ""
    show(banner, alert or (f"{failed} failed, and is restarted." if failed else ""))


def show(label: ui.label, text: str) -> None:
    """Show a text, or hide an empty one."""
    label.text = text
    label.set_visibility(bool(text))


async def keep_fresh(update: Callable[[], object], *refresh: Refresh, seconds: float) -> None:
    """Read, in a thread, and show what has changed, now and every few seconds."""
    client = ui.context.client

    async def turn() -> None:
        await threads.io_bound(update)
        for each in () if client.is_deleted else refresh:
            each()

    await turn()
    ui.timer(seconds, turn, immediate=False)


def add_run_page(
    runs: Runs, path: str, build: Callable[[Run], Refresh], seconds: float = 2.0
) -> None:
    """Add a page about a run, which is refreshed every few seconds."""

    @page(f"/{path}")
    async def _(run: str = "") -> None:
        await show_run(runs, run, path, build, seconds)


async def show_run(
    runs: Runs, name: str, path: str, build: Callable[[Run], Refresh], seconds: float = 2.0
) -> None:
    """Show a page about a run; if it is missing, the page says so."""
    if (run := find_run(runs, name)) is not None:
        with frame(runs, run, path) as head:
            refresh = build(run)
        update = partial(runs.update, run, metrics=True, live=True)
        await keep_fresh(update, head, refresh, seconds=seconds)


def find_run(runs: Runs, name: str) -> Run | None:
    """The run of a page; if it is missing, the page says so."""
    run = runs.find(name) if name else next(iter(runs.all()), None) if runs.single else None
    if run is None:
        with frame(runs), card("No such run"):
            ui.label(f"This folder holds no run {name!r}.").classes("muted")
    return run


@contextmanager
def card(
    title: str = "", note: str = "", within: ui.element | None = None, link: str = ""
) -> Iterator[ui.element]:
    """A box with a title, which may be a link; what the block adds is inside."""
    with within or nullcontext(), ui.element("section").classes("card") as box:
        if title:
            with ui.element("div").classes("card-head"):
                (ui.link(title, link) if link else ui.label(title)).classes("card-title")
                ui.label(note).classes("muted small")
        yield box


def draw(
    charts: dict[str, ui.echart],
    name: str,
    options: dict[str, Any],
    place: AbstractContextManager[object],
    kind: str = "chart",
) -> None:
    """Create a chart in its place, or update it without changing its zoom."""
    if name not in charts:
        with place:
            charts[name] = ui.echart(options).classes(kind)
    elif charts[name].options != options:
        charts[name].options.clear()
        charts[name].options.update(options)
        charts[name].update()


def search_box(hint: str, label: str = "search") -> ui.input:
    """A field for words to search."""
    box = ui.input(placeholder=hint).classes("search")
    return box.props(f'outlined dense clearable debounce="200" aria-label="{label}"')


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
    """A table that sorts by any column. A column `state` is shown with its colour.

    Args:
        labels: Titles of the columns by name.
        phone: Columns that a narrow screen shows.
        numbers: Columns that are aligned right and shortened.
        formats: JavaScript functions that format columns.
        key: The column that names a row.
        search: A field; rows that lack one of its words are hidden.
        more: Arguments of `ui.table`.
    """
    formatted = dict.fromkeys(numbers, "v => typeof v === 'number' ? dreamfleet.short(v) : v")
    formatted |= formats or {}
    columns = [
        {
            "name": name,
            "label": label,
            "field": name,
            "sortable": bool(label),
            "align": "right" if name in numbers else "left",
            "classes": f"col-{name}" if name in phone else f"col-{name} wide-only",
            "headerClasses": "" if name in phone else "wide-only",
            ":format": formatted.get(name, "v => v"),
        }
        for name, label in labels.items()
    ]
    made = ui.table(rows=more.pop("rows", []), columns=columns, row_key=key, **more)
    made.classes("runs").props(
        'flat dense virtual-scroll :rows-per-page-options="[0]" binary-state-sort hide-bottom'
    )
    made.add_slot("body-cell-state", STATE_CELL)
    if search is not None:
        made.props[":filter-method"] = _FILTER
        made.bind_filter_from(search, "value", lambda words: words or "")
    return made


def set_rows(shown: ui.table, rows: list[dict[str, Any]]) -> None:
    """Show rows, if they have changed."""
    if shown.rows != rows:
        shown.rows = rows


def with_hint(text: str) -> str:
    """An error, and how to allow code that a run names."""
    if "not part of Dreamfleet" not in text:
        return text
    return f"{text} If you trust the code that your runs name, start 'dreamfleet view --trust'."
