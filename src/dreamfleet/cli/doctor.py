"""`dreamfleet doctor`."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from dreamfleet.cli.console import out, say
from dreamfleet.errors import DreamfleetError
from dreamfleet.machine import inspect_machine

_MARKS = {
    "fine": Text("✓", style="green"),
    "untried": Text("·", style="dim"),
    "absent": Text("-", style="dim"),
    "hint": Text("!", style="yellow"),
    "problem": Text("✗", style="red"),
}


def doctor(logdir: Path = Path("runs")) -> None:
    """Check this machine: Python, JAX, memory, disk, rendering, sockets, limits, extras.

    A tick means that it was tried, for example that an environment was made and stepped; a dot
    means that it was only looked up. Every problem comes with its fix.

    Args:
        logdir: Where runs will be kept.
    """
    with out.status("trying what is installed, which takes half a minute"):
        findings = list(inspect_machine(logdir))
    table = Table.grid(padding=(0, 2))
    for each in findings:
        words = f"{each.found}\n{each.fix}" if each.fix else each.found
        table.add_row(_MARKS[each.state], each.what, words)
    say(table)
    say("\n✓ works (tried)   · looked up, not tried   - not installed   ! hint   ✗ problem")
    problems = sum(each.state == "problem" for each in findings)
    if problems:
        raise DreamfleetError(
            f"There {'is 1 problem' if problems == 1 else f'are {problems} problems'}, see above."
        )
    say("This machine is fit for training.")
