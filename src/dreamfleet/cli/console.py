"""The one place where commands speak to the person."""

import sys

from rich.console import Console, RenderableType
from rich.markup import escape

# What goes to a file has no edge at which it would have to be wrapped.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
_err = Console(stderr=True, highlight=False)


def say(message: str | RenderableType) -> None:
    """Print a result: plain text, or something that lays itself out."""
    out.print(message, markup=False, soft_wrap=isinstance(message, str))


def complain(message: str) -> None:
    """Print one sentence about what went wrong, on standard error."""
    _err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
