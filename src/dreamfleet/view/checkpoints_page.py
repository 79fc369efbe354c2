"""Checkpoints of a run with their scores, and its evaluations."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nicegui import events, ui

from dreamfleet.checkpoint import Checkpoint, CheckpointError, describe
from dreamfleet.metrics.evaluations import FILE_NAME
from dreamfleet.metrics.outputs.jsonl import last_rows
from dreamfleet.view.acts import add_acts, start_evaluation
from dreamfleet.view.frame import RunPage, card, columns
from dreamfleet.view.reading import open_inside
from dreamfleet.view.runs import Run

_MOST_EVALUATIONS, _MOST_BYTES = 500, 1 << 20
_EVALUATE = """<q-td :props="props"><q-btn flat dense no-caps label="Evaluate"
 @click="() => $parent.$emit('evaluate', props.row.name)"/></q-td>"""


class CheckpointsPage(RunPage):
    """Two tables, and a button for each checkpoint."""

    path, seconds = "checkpoints", 3.0

    def build(self) -> None:
        with card("Checkpoints", "the newest two, the best one, and one that is evaluated"):
            add_acts(self._run)
            names = ("step", "score", "saved", "size", "note", "act")
            labels = {name: name for name in names} | {"size": "bytes", "note": "", "act": ""}
            self._table = _table({"name": "checkpoint", **labels}, (*names[:3], "name", "act"))
            self._table.add_slot("body-cell-act", _EVALUATE)
            self._table.on("evaluate", self._evaluate)
        with card(
            "Evaluations", "rounds while training, at the end, and those that were asked for"
        ):
            labels = {"step": "step", "mean": "mean return", "error": "standard error"}
            more = {"episodes": "episodes", "kind": "kind", "note": ""}
            self._evaluations = _table({**labels, **more}, labels)

    def refresh(self) -> None:
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


def _table(labels: Mapping[str, str], phone: Collection[str]) -> ui.table:
    numbers = labels.keys() - {"name", "kind", "note", "act"}
    made = columns(labels, phone=phone, numbers=numbers)
    table = ui.table(rows=[], columns=made, row_key="name").classes("runs")
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
        with open_inside(run.path, FILE_NAME) as file:
            found = last_rows(file, _MOST_BYTES)
    except OSError:
        return []
    rows = []
    for number, each in enumerate(found):
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            row = {
                "name": str(number),
                "step": int(each["step"]),
                "mean": float(each["mean"]),
                "error": each.get("standard_error"),
                "episodes": int(each.get("episodes", 0)),
                "kind": str(each.get("kind", "")),
                "note": "interrupted" if each.get("partial") else str(each.get("error") or ""),
            }
            rows.append(row)
    return rows[: -_MOST_EVALUATIONS - 1 : -1]
