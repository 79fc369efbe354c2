"""The one place where commands speak to the person."""

from rich.console import Console
from rich.table import Table

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def say(message: str | Table) -> None:
    """Print a result: plain text, or a table."""
    _out.print(message, markup=False, soft_wrap=isinstance(message, str))


def complain(message: str) -> None:
    """Print one sentence about what went wrong, on standard error."""
    _err.print(f"[bold red]error:[/] {_escape(message)}", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
