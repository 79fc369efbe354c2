"""The configuration of a run: what differs from the nearest preset first."""

from __future__ import annotations

from nicegui import ui

from dreamfleet.agents.registry import BUILT_IN
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS
from dreamfleet.view.frame import RunPage, card, columns, search_box
from dreamfleet.view.runs import Run


class SettingsPage(RunPage):
    """A table of all settings."""

    path = "configuration"

    def build(self) -> None:
        if self._run.config is not None:
            _show(self._run, self._run.config)
            return
        with card("The configuration cannot be read"):
            ui.label(self._run.row.problem).classes("muted")


def _show(run: Run, config: RunConfig) -> None:
    name = run.row.preset.partition(" ")[0]
    theirs = PRESETS[name].flat() if name in PRESETS else {}
    # A file does not choose code that is imported.
    known = config if config.agent in BUILT_IN else RunConfig()
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
        for key, value in config.flat().items()
    ]
    rows.sort(key=lambda row: not row["preset"])
    with card("Configuration", f"next to the preset {name}; what differs is first"):
        search = search_box("search names, values and meanings").classes("finder")
        labels = {"setting": "setting", "value": "value", "preset": f"preset {name}"}
        shown = columns({**labels, "sentence": "meaning"}, phone=labels)
        table = ui.table(rows=rows, columns=shown, row_key="setting").classes("runs settings")
        table.props('flat wrap-cells virtual-scroll :rows-per-page-options="[0]" hide-bottom')
        table.bind_filter_from(search, "value", lambda words: words or "")
