"""The command line: `dreamfleet COMMAND ...`.

Each command is one module of this package with a function of its own name (`check-env` is
`check_env`); its signature is its command line (tyro). A command is imported only when it is
asked for, so that the others stay quick.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import RenderableType

from dreamfleet import __version__
from dreamfleet.cli.console import complain, say
from dreamfleet.cli.help import help_of
from dreamfleet.cli.options import check_flags
from dreamfleet.errors import DreamfleetError
from dreamfleet.presets import preset

COMMANDS = {
    "train": "train an agent",
    "eval": "play episodes with a trained agent",
    "status": "say what a run is doing",
    "plot": "draw learning curves, beside published ones",
    "role": "run one role of a run by hand, for example on a second computer",
    "check-env": "play an environment and say what is wrong with it",
    "doctor": "look over this machine, and say what it lacks",
    "bench": "measure speed, side by side with peers",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        say(_usage())
        return 0
    if name == "--version":
        say(f"dreamfleet {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else " See 'dreamfleet --help'."
        complain(f"There is no command {name!r}.{hint}")
        return 2
    function = name.replace("-", "_")
    command = getattr(importlib.import_module(f"dreamfleet.cli.{function}"), function)
    if {"-h", "--help"} & set(args[1:]):
        say(_help(name, command))
        return 0
    try:
        check_flags(command, args[1:])
        tyro.cli(command, args=args[1:], prog=f"dreamfleet {name}")
    except DreamfleetError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _help(name: str, command: Callable[..., Any]) -> RenderableType:
    # What is not given to `train` is what the default preset says.
    defaults = vars(preset("default")) if name == "train" else {}
    return help_of(name, command, {k: v for k, v in defaults.items() if k != "logdir"})


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: dreamfleet COMMAND [OPTIONS]\n\n"
        f"commands:\n{rows}\n\n"
        "'dreamfleet COMMAND --help' explains one. 'dreamfleet --version' tells the version."
    )
