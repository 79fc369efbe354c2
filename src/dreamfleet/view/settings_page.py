"""The configuration of a run: what differs from the nearest preset first."""

from __future__ import annotations

from nicegui import ui

from dreamfleet.agents.registry import BUILT_IN
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS
from dreamfleet.view.frame import card, find_run, frame
from dreamfleet.view.runs import Run, Runs


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/configuration")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is None:
            return
        runs.attend(found.name)
        with frame(runs, found, "configuration"):
            if found.config is None:
                with card("The configuration cannot be read"):
                    ui.label(found.row.problem).classes("muted")
            else:
                _show(found)


def _show(run: Run) -> None:
    assert run.config is not None
    flat = run.config.flat()
    name = run.row.preset.partition(" ")[0]
    theirs = PRESETS[name].flat() if name in PRESETS else {}
    # A file does not choose code that is imported.
    known = run.config if run.config.agent in BUILT_IN else RunConfig()
    sentences = {setting.path: setting.sentence for setting in known.settings()}
    rows = [
        {
            "setting": key,
            "value": str(value),
            "preset": str(theirs[key])
            if theirs.get(key, value) != value and key != "logdir"
            else "",
            "sentence": sentences.get(key, ""),
        }
        for key, value in flat.items()
    ]
    rows.sort(key=lambda row: not row["preset"])
    with card("Configuration", f"next to the preset {name}; what differs is first"):
        search = ui.input(placeholder="search names, values and meanings")
        search.props('outlined dense clearable debounce="150" aria-label="search"')
        search.classes("search finder")
        columns = [
            {"name": "setting", "label": "setting", "field": "setting", "align": "left"},
            {"name": "value", "label": "value", "field": "value", "align": "left"},
            {"name": "preset", "label": f"preset {name}", "field": "preset", "align": "left"},
            {
                "name": "sentence",
                "label": "meaning",
                "field": "sentence",
                "align": "left",
                "classes": "wide-only words",
                "headerClasses": "wide-only",
            },
        ]
        table = ui.table(rows=rows, columns=columns, row_key="setting").classes("runs settings")
        table.props('flat wrap-cells virtual-scroll :rows-per-page-options="[0]" hide-bottom')
        table.bind_filter_from(search, "value", lambda words: words or "")
