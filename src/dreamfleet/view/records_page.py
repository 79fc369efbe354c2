"""What a run has written down: its logs, its checkpoints and its configuration."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nicegui import events, ui

from dreamfleet.agents.registry import BUILT_IN
from dreamfleet.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS
from dreamfleet.view.actions import add_actions, evaluate
from dreamfleet.view.frame import Refresh, card, search_box, set_rows, table
from dreamfleet.view.reading import list_inside, read_tail
from dreamfleet.view.runs import Run, changed_at

_TAIL_BYTES = 1 << 19
_MAX_ROWS, _MAX_TEXT, _MAX_EVALUATIONS = 1000, 4000, 500
_QUIET, _TIME = ("", "DEBUG", "INFO"), "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"^(\S+ \S+) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_EVALUATE_CELL = """<q-td :props="props"><q-btn flat dense no-caps color="primary" label="Evaluate"
 @click="() => $parent.$emit('evaluate', props.row.name)"/></q-td>"""


def build_logs(run: Run) -> Refresh:
    """Log records of every process, the newest first."""
    with card("Logs", "newest first"):
        with ui.element("div").classes("row-of finder"):
            search = search_box("filter: process, level, words")
            errors = ui.switch("warnings and errors", on_change=lambda: refresh()).props("dense")
            count = ui.label().classes("muted small")
        labels = {"time": "time", "process": "process", "state": "level", "text": "message"}
        shown = table(labels, phone=("process", "text"), key="key", search=search)
        shown.classes("log").props("wrap-cells")

    def refresh() -> None:
        rows = []
        for name in list_inside(run.path, "logs"):
            block = read_tail(run.path, "logs", name, max_bytes=_TAIL_BYTES)
            changed = time.localtime(changed_at(run.path / "logs" / name) / 1e9)
            rows += log_rows(name.removesuffix(".log"), block, time.strftime(_TIME, changed))
        rows = [row for row in rows if row["state"] not in _QUIET or not errors.value]
        rows.sort(key=lambda row: row["time"])
        rows.reverse()
        more = f", the last {_MAX_ROWS:,} are shown" if len(rows) > _MAX_ROWS else ""
        count.text = f"{len(rows):,} records{more}"
        set_rows(shown, rows[:_MAX_ROWS])

    return refresh


def log_rows(process: str, block: bytes, at: str) -> list[dict[str, Any]]:
    """Records of a log as rows of a table. Lines without a level belong to the record before them,
    as a traceback does; if there is none, they have this time."""
    rows: list[dict[str, Any]] = []
    level = ""
    for line in block.decode(errors="replace").splitlines():
        if match := _LINE.match(line):
            at, level, line = match.groups()
        elif line.startswith(("Traceback", "Fatal Python error")):
            level = "ERROR"
        if rows and level and not match:
            rows[-1] |= {"state": level, "text": f"{rows[-1]['text']}\n{line}"[:_MAX_TEXT]}
        else:
            about = {"key": f"{process}-{len(rows)}", "process": process, "time": at}
            rows.append({**about, "state": level, "text": line[:_MAX_TEXT]})
    return rows


def build_checkpoints(run: Run) -> Refresh:
    """Checkpoints with their scores, and evaluations."""

    def evaluate_one(event: events.GenericEventArguments) -> None:
        names = [row["name"] for row in checkpoint_rows(run)]
        if event.args in names:  # a name from a browser is looked up, never opened
            ui.notify(evaluate(run, run.path / "ckpt" / "agent" / str(event.args)))

    with card("Checkpoints", "the newest two, the best one, and one being evaluated"):
        refresh_actions = add_actions(run)
        labels = {"step": "step", "score": "score", "saved": "saved", "size": "bytes"}
        labels |= {"name": "file", "note": "", "act": ""}
        phone = ("step", "score", "saved", "act")
        checkpoints = table(labels, phone=phone, numbers=("step", "score", "size"))
        checkpoints.add_slot("body-cell-act", _EVALUATE_CELL)
        checkpoints.on("evaluate", evaluate_one)
    with card("Evaluations", "during training, at its end, and on demand"):
        labels = {"step": "step", "mean": "mean return", "standard_error": "standard error"}
        more = {"episodes": "episodes", "kind": "kind", "note": ""}
        evaluations = table(labels | more, phone=labels, numbers=(*labels, "episodes"))

    def refresh() -> None:
        refresh_actions()
        set_rows(checkpoints, checkpoint_rows(run))
        set_rows(evaluations, evaluation_rows(run))

    return refresh


def checkpoint_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of a table of checkpoints."""
    directory = Checkpoint(run.path / "ckpt" / "agent")
    best = directory.best()
    return [_checkpoint_row(path, path == best) for path in directory.all()]


def _checkpoint_row(path: Path, best: bool) -> dict[str, Any]:
    try:
        found = read_checkpoint(path, ())
    except CheckpointError as error:
        return {"name": path.name, "note": str(error)}
    return {
        "name": path.name,
        "step": found.step,
        "score": found.score,
        "saved": time.strftime("%d %b %H:%M", time.localtime(found.time)),
        "size": found.bytes,
        "note": ", ".join(["best"] * best + ["being evaluated"] * found.pending),
    }


def evaluation_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of a table of evaluations, the newest first."""
    rows = []
    for number, each in enumerate(run.evaluations()):
        row: dict[str, Any] = {"name": str(number), "kind": str(each.get("kind", ""))}
        row |= {name: each[name] for name in ("step", "mean", "standard_error", "episodes")}
        row["note"] = "interrupted" if each.get("partial") else str(each.get("error") or "")
        rows.append(row)
    return rows[: -_MAX_EVALUATIONS - 1 : -1]


def build_configuration(run: Run) -> Refresh:
    """All settings; those that differ from the closest preset come first."""
    name = run.row.preset.partition(" ")[0]
    theirs = PRESETS[name].flat() if name in PRESETS else {}
    with card("Configuration", f"compared with the preset {name}; differences come first"):
        search = search_box("search names, values and meanings").classes("finder")
        labels = {"name": "setting", "value": "value", "preset": f"preset {name}"}
        settings = table(labels | {"meaning": "meaning"}, phone=labels, search=search)
        settings.classes("settings").props("wrap-cells")
    # The banner says why a configuration cannot be read.
    return lambda: set_rows(settings, setting_rows(run.config, theirs) if run.config else [])


def setting_rows(config: RunConfig, preset: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a table of settings."""
    # A file does not choose code that is imported.
    known = config if config.agent in BUILT_IN else RunConfig()
    meanings = {setting.path: setting.help for setting in known.settings()}
    rows = []
    for key, value in config.flat().items():
        differs = preset.get(key, value) != value and key != "logdir"
        other = str(preset[key]) if differs else ""
        row = {"name": key, "value": str(value), "preset": other, "meaning": meanings.get(key, "")}
        rows.append(row)
    return sorted(rows, key=lambda row: not row["preset"])
