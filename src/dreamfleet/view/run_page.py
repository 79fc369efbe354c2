"""A run: how far it is, and the curves that matter most."""

from __future__ import annotations

from nicegui import ui

from dreamfleet.view.frame import card, find_run, frame
from dreamfleet.view.runs import Run, Runs


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/run")
    def page(run: str = "") -> None:
        show_run(runs, run)


def show_run(runs: Runs, name: str) -> None:
    """The page of a run."""
    found = find_run(runs, name)
    if found is not None:
        _Overview(runs, found)


class _Overview:
    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        runs.attend(run.name)
        with frame(runs, run, "run"), card(run.row.task):
            self._line = ui.label()
        self.refresh()
        ui.timer(1.0, self.refresh, immediate=False)

    def refresh(self) -> None:
        self._runs.attend(self._run.name)
        status = self._run.status
        if status is not None:
            self._line.text = status.line()
