"""Logs of every process of a run, with search and levels."""

from __future__ import annotations

import re
from collections import deque
from html import escape

from nicegui import ui

from dreamfleet.view.frame import RunPage, card, search_box
from dreamfleet.view.reading import list_inside, open_inside
from dreamfleet.view.runs import Run

_TAIL_BYTES = 1 << 19
_LINES = 400
_LONGEST_LINE = 2000
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LEVEL = re.compile(rf"^\S+ \S+ ({'|'.join(_LEVELS)}) ")
_ALL = "every process"


class LogsPage(RunPage):
    """Lines of the logs, the newest last."""

    path, seconds = "logs", 1.5

    def build(self) -> None:
        self._shown: object = None
        with card():
            with ui.element("div").classes("row-of wishes"):
                self._which = ui.select([_ALL, *self._names()], value=_ALL, label="process")
                self._which.props("outlined dense options-dense").classes("choice")
                self._level = ui.select(["all", *_LEVELS[1:]], value="all", label="level")
                self._level.props("outlined dense options-dense").classes("choice")
                self._search = search_box("search", self.refresh)
                self._count = ui.label().classes("muted small")
            for wish in (self._which, self._level):
                wish.on_value_change(self.refresh)
            self._text = ui.html().classes("log").props('tabindex="0" aria-label="log"')

    def _names(self) -> list[str]:
        return [entry.name for entry in list_inside(self._run.path, "logs")]

    def refresh(self) -> None:
        names = self._names()
        if self._which.options != [_ALL, *names]:
            self._which.set_options([_ALL, *names])
        chosen = [name for name in names if self._which.value in (_ALL, name)]
        sizes = [_size(self._run, name) for name in chosen]
        wish = (self._level.value, (self._search.value or "").lower())
        shown = (chosen, sizes, wish)
        if shown == self._shown:
            return
        self._shown = shown
        lines: deque[tuple[str, str, str]] = deque(maxlen=_LINES)
        found = []
        for name in chosen:
            found += _lines(self._run, name, *wish)
        if len(chosen) > 1:  # by their time; what follows a line without one stays behind it
            found.sort(key=lambda line: line[0])
        lines.extend((name, level, text) for _, name, level, text in found)
        rows = [
            f'<div class="{level.lower()}">'
            + (f"<b>{escape(name.removesuffix('.log'))}</b> " if len(chosen) > 1 else "")
            + f"{escape(text)}</div>"
            for name, level, text in lines
        ]
        more = f", the last {_LINES} are shown" if len(found) > _LINES else ""
        self._count.text = f"{len(found)} lines{more}"
        nothing = '<div class="muted">Nothing is logged here.</div>'
        self._text.content = f"<div>{''.join(rows) or nothing}</div>"


def _size(run: Run, name: str) -> int:
    try:
        with open_inside(run.path, "logs", name) as file:
            return file.seek(0, 2)
    except OSError:
        return 0


def _lines(run: Run, name: str, least: str, words: str) -> list[tuple[str, str, str, str]]:
    """Time, file, level and text of the last lines. A traceback has the time and the level of the
    line before it, or else is an error."""
    try:
        with open_inside(run.path, "logs", name) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    rows = text.splitlines()[1 if size > _TAIL_BYTES else 0 :]
    time, level, found = "", "ERROR", []
    for row in rows:
        if match := _LEVEL.match(row):
            level, time = match[1], row[:23]
        elif row.startswith(("Traceback", "Fatal Python error")):
            level = "ERROR"
        if least != "all" and _LEVELS.index(level) < _LEVELS.index(least):
            continue
        if words in row.lower():
            found.append((time, name, level, row[:_LONGEST_LINE]))
    return found
