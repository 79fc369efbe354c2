"""What a run has written down: its logs, its checkpoints and its configuration."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from html import escape
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
from dreamfleet.view.runs import Run

_TAIL_BYTES = 1 << 19
_MAX_LINES, _MAX_LINE, _MAX_EVALUATIONS = 400, 2000, 500
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LEVEL = re.compile(rf"^\S+ \S+ ({'|'.join(_LEVELS)}) ")
_ALL = "every process"
_EVALUATE_CELL = """<q-td :props="props"><q-btn flat dense no-caps color="primary" label="Evaluate"
 @click="() => $parent.$emit('evaluate', props.row.name)"/></q-td>"""


def build_logs(run: Run) -> Refresh:
    """Log lines of every process, the newest last."""
    shown: object = None

    def refresh() -> None:
        nonlocal shown
        names = list_inside(run.path, "logs")
        if process.options != [_ALL, *names]:
            process.set_options([_ALL, *names])
        chosen = [name for name in names if process.value in (_ALL, name)]
        tails = {n: read_tail(run.path, "logs", n, max_bytes=_TAIL_BYTES) for n in chosen}
        wanted = (tails, str(level.value), (search.value or "").lower())
        if wanted == shown:
            return
        shown = wanted
        lines = [
            (at, name, kind, row)
            for name, block in tails.items()
            for at, kind, row in log_lines(block, *wanted[1:])
        ]
        if len(chosen) > 1:  # stable: a traceback stays behind its line
            lines.sort(key=lambda line: line[0])
        rows = [
            f'<div class="{kind.lower()}">'
            + (f"<b>{escape(name.removesuffix('.log'))}</b> " if len(chosen) > 1 else "")
            + f"{escape(row)}</div>"
            for _, name, kind, row in lines[-_MAX_LINES:]
        ]
        more = f", the last {_MAX_LINES} are shown" if len(lines) > _MAX_LINES else ""
        count.text = f"{len(lines)} lines{more}"
        nothing = '<div class="muted">No lines.</div>'
        text.content = f"<div>{''.join(rows) or nothing}</div>"

    with card():
        with ui.element("div").classes("row-of options"):
            process = ui.select([_ALL], value=_ALL, label="process")
            level = ui.select(["all", *_LEVELS[1:]], value="all", label="level")
            for choice in (process, level):
                choice.props("outlined dense options-dense").classes("choice")
                choice.on_value_change(refresh)
            search = search_box("search", refresh)
            count = ui.label().classes("muted small")
        text = ui.html().classes("log").props('tabindex="0" aria-label="log"')
    return refresh


def log_lines(block: bytes, least: str, words: str) -> list[tuple[str, str, str]]:
    """Time, level and text of lines. A traceback takes the time and level of the line before it,
    or is an error."""
    at, level, found = "", "ERROR", []
    for row in block.decode(errors="replace").splitlines():
        if match := _LEVEL.match(row):
            level, at = match[1], row[:23]
        elif row.startswith(("Traceback", "Fatal Python error")):
            level = "ERROR"
        if least != "all" and _LEVELS.index(level) < _LEVELS.index(least):
            continue
        if words in row.lower():
            found.append((at, level, row[:_MAX_LINE]))
    return found


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
