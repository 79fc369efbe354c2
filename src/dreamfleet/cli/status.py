"""`dreamfleet status LOGDIR`."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from dreamfleet.cli.console import out, say, write
from dreamfleet.config import read_config
from dreamfleet.display import live, picture, picture_svg
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.fleet.record import RunStatus
from dreamfleet.fleet.status import Watcher

_PATIENCE = 3.0
_BETWEEN_PICTURES = 10.0


def status(
    logdir: Path,
    /,
    follow: bool = False,
    json: bool = False,
    svg: Path | None = None,
    check: bool = False,
) -> None:
    """Show what a run is doing, also from another terminal.

    Args:
        logdir: The run's directory.
        follow: Repeat until Ctrl-C; without a terminal until the run ends.
        json: Print one JSON object in a line instead of the table.
        svg: Also write the table to this file, as a picture.
        check: Print nothing, and exit with code 1 unless the run is alive and responds: a health
            check for containers.
    """
    if check:
        _check(logdir)
        return
    live_display = follow and out.is_terminal and not json
    watcher = Watcher(logdir, math.inf)  # all scores at once
    found = watcher.look(_PATIENCE)
    if found is None:
        read_config(logdir)  # says what is wrong with it
        raise ConfigError(f"{logdir} holds a run that has only just started: ask again.")
    if svg:
        write(svg, picture_svg(found))
    if not live_display:
        _show(found, json)
    while follow and not live_display and found is not None and found.running:
        threading.Event().wait(_BETWEEN_PICTURES)
        found = watcher.look(_PATIENCE)
        if found is not None:
            _show(found, json)
    if live_display:
        with live(logdir, out):
            threading.Event().wait()


def _check(logdir: Path) -> None:
    found = Watcher(logdir).look(_PATIENCE)
    if found is None or not found.running:
        how = "has not begun" if found is None else f"is {found.state}"
        raise DreamfleetError(f"The run in {logdir} {how}.")
    if found.state != "evaluating" and not found.responding:
        raise DreamfleetError(f"The run in {logdir} is under way, but its logger does not respond.")


def _show(found: RunStatus, as_json: bool) -> None:
    if as_json:
        out.print(found.to_json(), markup=False, emoji=False, soft_wrap=True)
    else:
        say(picture(found))
