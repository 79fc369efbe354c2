"""`dreamfleet view [DIR]`."""

from __future__ import annotations

import subprocess
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dreamfleet.cli.console import out, say
from dreamfleet.errors import ConfigError, import_extra
from dreamfleet.fleet.preflight import check_place
from dreamfleet.fleet.tied import tied

_END_SECONDS = 10.0


def view(
    folder: Path = Path("runs"),
    /,
    host: str = "127.0.0.1",
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None,
    browser: bool = True,
    trust: bool = False,
) -> None:
    """Serve a page about a run, or a folder of runs, live while they run and afterwards.

    The printed address holds a token, which every request needs. Only this
    machine reaches the page, unless you name another address to listen on.

    Args:
        folder: A run's directory, or a folder of runs.
        host: The address to listen on, such as 0.0.0.0 for all networks.
        port: The port; without one 8765, or another one if that is taken.
        browser: Also open the page in a browser, if there is a terminal.
        trust: Import your own environments, agents or networks that the runs name,
            to dream with them and to evaluate them.
    """
    _need_the_extra()
    from dreamfleet.view.app import is_loopback, serve

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}: name one that holds runs, or a run.")

    def ready(url: str) -> None:
        say(url)
        if not is_loopback(host):
            say("The address gives access to the runs. The connection is not encrypted.")
        say("Ctrl-C ends the page; runs continue.")
        if browser:
            _open(url)

    serve(folder, host=host, port=port, trust=trust, ready=ready)


@contextmanager
def page_beside(logdir: Path) -> Iterator[None]:
    """A page about a run, by a process that ends with the block, or with this process."""
    _need_the_extra()
    check_place(logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        tied(["dreamfleet.cli", "view", str(logdir), "--no-browser"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if url := process.stdout.readline().strip():
            say(f"Page: {url}")
            _open(url)
        else:
            say("There is no page: its process has ended.")
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _need_the_extra() -> None:
    import_extra("nicegui", "Pages in a browser", "web")


def _open(url: str) -> None:
    """Open a page in a browser, if there is a terminal."""
    if out.is_terminal:
        webbrowser.open(url)
