"""What commands print and write."""

import os
import sys
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape

from dreamfleet.errors import ConfigError
from dreamfleet.files import atomic_write

# What goes to a file has no edge at which it would have to be wrapped.
_is_terminal = sys.stdout is not None and sys.stdout.isatty()
# Without emoji, or "module:factory: ..." would show a picture of a factory.
out = Console(highlight=False, emoji=False, width=None if _is_terminal else 180)
_err = Console(stderr=True, highlight=False, emoji=False)


def open_streams() -> None:
    """Let everything be written: to nowhere if a stream is closed, and with a question mark for
    what a terminal cannot show."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # no file that is opened later becomes a standard stream
    os.close(descriptor)
    is_closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - it stays open
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if is_closed:
        complain("Standard output is closed, so nothing is shown: redirect it to a file.")


def close_streams() -> None:
    """Drop what cannot be written any more, such as to a closed terminal: Python would end with
    another exit code for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def say(message: str | RenderableType) -> None:
    """Print a result: plain text, or something that lays itself out."""
    out.print(message, markup=False, soft_wrap=isinstance(message, str))


def note(message: str) -> None:
    """Print a line that is no result, on standard error."""
    _err.print(message, markup=False, soft_wrap=True)


def complain(message: str) -> None:
    """Print one sentence about what went wrong, on standard error."""
    _err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a file that the user asked for, in a directory that need not exist.

    Raises:
        ConfigError: It cannot be written there.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a terminal, which must not be replaced
        else:
            atomic_write(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
