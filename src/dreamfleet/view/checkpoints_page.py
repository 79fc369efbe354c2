"""Checkpoints of a run with their scores, and its evaluations."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nicegui import events, ui

from dreamfleet.checkpoint import Checkpoint, CheckpointError, describe
from dreamfleet.view.acts import add_acts, start_evaluation
from dreamfleet.view.frame import card, find_run, frame, keep_fresh
from dreamfleet.view.inside import open_inside
from dreamfleet.view.runs import Run, Runs

_REFRESH_SECONDS = 3.0
_MOST_EVALUATIONS = 500
_EVALUATE = """<q-td :props="props"><q-btn flat dense no-caps label="Evaluate"
 @click="() => $parent.$emit('evaluate', props.row.name)"/></q-td>"""


def add(runs: Runs) -> None:
    """Add the page."""

    @ui.page("/checkpoints")
    def page(run: str = "") -> None:
        found = find_run(runs, run)
        if found is not None:
            _Checkpoints(runs, found)


class _Checkpoints:
    def __init__(self, runs: Runs, run: Run) -> None:
        self._runs, self._run = runs, run
        runs.attend(run.name)
        with frame(runs, run, "checkpoints"):
            with card("Checkpoints", "the newest two, the best one, and one that is evaluated"):
                add_acts(run)
                self._table = _table(
                    {"name": "checkpoint", "step": "step", "score": "score", "saved": "saved"},
                    {"size": "bytes", "note": ""},
                )
                self._table.columns = [
                    *self._table.columns,
                    {"name": "act", "label": "", "field": "act"},
                ]
                self._table.add_slot("body-cell-act", _EVALUATE)
                self._table.on("evaluate", self._evaluate)
            with card("Evaluations", "rounds while training, and at the end"):
                self._evaluations = _table(
                    {"step": "step", "mean": "mean return", "error": "standard error"},
                    {"episodes": "episodes", "kind": "kind", "note": ""},
                )
        keep_fresh(self.refresh, _REFRESH_SECONDS)

    def refresh(self) -> None:
        """Show what has changed."""
        self._runs.attend(self._run.name)
        for table, rows in (
            (self._table, _checkpoints(self._run)),
            (self._evaluations, _evaluations(self._run)),
        ):
            if table.rows != rows:
                table.rows = rows

    def _evaluate(self, event: events.GenericEventArguments) -> None:
        names = [row["name"] for row in _checkpoints(self._run)]
        if event.args in names:  # a name from a browser is looked up, never opened
            path = self._run.path / "ckpt" / "agent" / str(event.args)
            ui.notify(start_evaluation(self._run, path) or "Ten episodes are played.")


def _table(first: dict[str, str], second: dict[str, str]) -> ui.table:
    columns: list[dict[str, Any]] = [
        {
            "name": name,
            "label": label,
            "field": name,
            "sortable": True,
            "align": "left" if name in ("name", "kind", "note") else "right",
            ":format": "v => typeof v === 'number' ? dreamfleet.short(v) : v",
            **({"classes": "wide-only", "headerClasses": "wide-only"} if name in second else {}),
        }
        for name, label in {**first, **second}.items()
    ]
    table = ui.table(rows=[], columns=columns, row_key="name").classes("runs")
    return table.props('flat :rows-per-page-options="[0]" hide-bottom binary-state-sort')


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    directory = Checkpoint(run.path / "ckpt" / "agent")
    best = directory.best()
    return [_described(path, path == best) for path in directory.all()]


def _described(path: Path, best: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": path.name}
    try:
        found = describe(path)
    except CheckpointError as error:
        return {**row, "note": str(error)}
    notes = ["best"] if best else []
    notes += ["its score follows"] if found.pending else []
    return {
        **row,
        "step": found.step,
        "score": found.score,
        "saved": time.strftime("%d %b %H:%M", time.localtime(found.time)),
        "size": found.bytes,
        "note": ", ".join(notes),
    }


def _evaluations(run: Run) -> list[dict[str, Any]]:
    try:
        with open_inside(run.path, "evaluations.jsonl") as file:
            lines = file.readlines()[-_MOST_EVALUATIONS:]
    except OSError:
        return []
    rows = []
    for number, line in enumerate(lines):
        try:
            found = json.loads(line)
            row = {
                "name": str(number),
                "step": int(found["step"]),
                "mean": float(found["mean"]),
                "error": found.get("standard_error"),
                "episodes": int(found.get("episodes", 0)),
                "kind": str(found.get("kind", "")),
                "note": "interrupted" if found.get("partial") else str(found.get("error") or ""),
            }
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        rows.append(row)
    return rows[::-1]
