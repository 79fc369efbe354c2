"""`dreamfleet view [DIR]`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dreamfleet.cli.console import say
from dreamfleet.errors import ConfigError, import_extra


def view(
    folder: Path = Path("runs"),
    /,
    host: str = "127.0.0.1",
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None,
    browser: bool = True,
) -> None:
    """Serve a page about a run, or a folder of runs, live while they run and afterwards.

    The address that is printed holds a token, and nothing is shown or done without it. Only this
    machine reaches the page, unless you name another address to listen on.

    Args:
        folder: A run's directory, or a folder of runs.
        host: The address to listen on: 0.0.0.0 for all of this machine.
        port: The port; without one 8765, or another one if that is taken.
        browser: Also open the page in a browser, if there is a terminal.
    """
    import_extra("nicegui", "Pages in a browser", "web")
    from dreamfleet.view.app import Address, is_loopback, serve

    if not folder.is_dir() and folder == Path("runs"):
        raise ConfigError("There is no folder runs here: name the one that holds your runs.")

    def ready(address: Address) -> None:
        say(address.url)
        if not is_loopback(host):
            say("Whoever has this address can see and end the runs. It is not encrypted.")
        say("Ctrl-C ends it; runs go on.")
        if browser and sys.stdout.isatty():
            webbrowser.open(address.url)

    serve(folder, host=host, port=port, ready=ready)
