"""Videos of a run, over training time."""

from __future__ import annotations

from nicegui import ui

from dreamfleet.view.frame import card, find_run, frame
from dreamfleet.view.runs import Runs


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/look")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is None:
            return
        runs.attend(found.name)
        with frame(runs, found, "look"), card("Videos"):
            ui.label("There are no videos yet.").classes("muted")
