"""`dreamfleet status LOGDIR`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import tyro

from dreamfleet.cli.console import out, say
from dreamfleet.cli.files import write
from dreamfleet.cli.live import drawing, live, picture
from dreamfleet.errors import ConfigError
from dreamfleet.fleet.overview import Watcher

_PATIENCE = 3.0
_BETWEEN = 0.5
_BETWEEN_PICTURES = 10.0


def status(
    logdir: Annotated[Path, tyro.conf.Positional],
    /,
    follow: bool = False,
    svg: Path | None = None,
) -> None:
    """Say what a run is doing, also from another terminal.

    Args:
        logdir: The run's directory.
        follow: Go on showing it, until Ctrl-C; without a terminal until the run ends.
        svg: Also write the picture to this file.
    """
    drawn = follow and out.is_terminal
    with Watcher(logdir) as watcher:
        found = watcher.look(_PATIENCE)
        if found is not None and found.running:
            # What a process keeps busy is known from the second look on.
            threading.Event().wait(_BETWEEN)
            found = watcher.look(_PATIENCE)
        if found is None:
            raise ConfigError(f"{logdir} holds no run: there is no {logdir / 'config.json'}.")
        if not drawn:
            say(picture(found))
        if svg:
            write(svg, drawing(found))
        while follow and not drawn and found is not None and found.running:
            threading.Event().wait(_BETWEEN_PICTURES)
            found = watcher.look(_PATIENCE)
            if found is not None:
                say(picture(found))
    if drawn:
        with live(logdir):
            threading.Event().wait()
