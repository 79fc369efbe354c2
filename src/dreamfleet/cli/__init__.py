"""The command line: `dreamfleet COMMAND ...`.

A command is a function anywhere in the package: its parameters are the options, its docstring is
the help, and what it returns is printed. It is imported when it is asked for. `train`, `resume` and
`sweep` take the words themselves, because their options are the settings of a run (`OPTIONS`).
"""

from __future__ import annotations

import ast
import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import dreamfleet
from dreamfleet.cli.arguments import call, function_options, help_of
from dreamfleet.cli.console import close_streams, complain, open_streams, say
from dreamfleet.errors import DreamfleetError, did_you_mean
from dreamfleet.settings import load_object

COMMANDS: Mapping[str, str] = {
    "train": "cli.train:train",
    "resume": "cli.train:resume",
    "sweep": "cli.train:sweep",
    "eval": "cli.commands:eval",
    "status": "cli.commands:status",
    "view": "cli.commands:view",
    "export": "cli.commands:export",
    "push": "hub:push",
    "pull": "hub:pull",
    "dataset": "datasets:dataset",
    "plot": "plotting:plot",
    "join": "cli.commands:join",
    "invite": "cli.commands:invite",
    "role": "cli.commands:role",
    "check-env": "cli.check_env:check_env",
    "doctor": "cli.doctor:doctor",
}
"""Every command, and its function."""

OPTIONS = {
    "train": "cli.train:options_of",
    "resume": "cli.train:resume_options",
    "sweep": "cli.train:sweep_options",
}
"""What lists the options of commands that take the words themselves."""

EXAMPLES = """
train | gym:CartPole-v1, on two cores
train --task dmc:walker_walk | another task
train --task my_package.my_module:my_factory | your own environment
train --dreamer.model 1m --dreamer.loss.entropy-scale 0.001 | settings of the agent
resume runs/gym-CartPole-v1 | as it was
resume runs/gym-CartPole-v1 --steps 60000 | and longer
sweep --seeds 0,1,2 --task gym:Acrobot-v1 | three seeds
sweep --set train_ratio=32,64 --parallel 2 | two settings at the same time
sweep --set dreamer.optimizer.learning_rate='log(1e-4,1e-2)' --trials 20 | a search
eval runs/gym-CartPole-v1 --episodes 20 | twenty new episodes
eval runs/gym-CartPole-v1 --video play.mp4 --json | with a video, as one JSON object
status runs/gym-CartPole-v1 --follow | until Ctrl-C
view | every run in runs/
view runs/gym-CartPole-v1 --no-browser | one run
plot runs/seed-0 runs/seed-1 --out curves.png | seeds as mean and range
join 'dreamfleet://10.0.0.5:5550/#KEY' --envs 4 | four environments
join 'dreamfleet://10.0.0.5:5550/#KEY' --eval-envs 1 | one for evaluation
invite runs/gym-CartPole-v1 | all lines
invite runs/gym-CartPole-v1 --name laptop | another line
invite runs/gym-CartPole-v1 --revoke laptop | revoke it
check-env gym:Pendulum-v1 | can an agent use it?
check-env bundled:catch --options size=[32,32] | with options
doctor | what works, and what is missing
"""
"""Lines that show how a command is used, and what each does."""

MOVED = {
    "bench": "make bench ARGS='fleet --json rows.json'",
    "chaos": "make chaos ARGS='--minutes 30 --goals'",
    "soak": "make soak ARGS='runs/soak --minutes 60'",
}
"""Former commands, and what runs them in a checkout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for what was asked and cannot work, 1 for what went
    wrong later."""
    open_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        say(_usage())
        return 0
    if name == "--version":
        from dreamfleet import __version__

        say(f"dreamfleet {__version__}")
        return 0
    if name in MOVED:
        complain(
            f"'dreamfleet {name}' has moved out of the package: use {MOVED[name]} in a checkout."
        )
        return 2
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, "see 'dreamfleet --help'.")
        complain(f"There is no command {name!r}: {hint}")
        return 2
    try:
        with _signals():
            _run(name, args[1:])
    except DreamfleetError as error:
        complain(str(error))
        # An error about what was given is a ValueError too.
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    except _Terminated:
        return 128 + signal.SIGTERM
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error.__context__, KeyboardInterrupt) and error.args[:1] == (errno.EIO,):
            return 130  # its terminal was closed, and takes nothing more
        if not (sentence := _about_machine(error)):
            raise
        complain(sentence)
        return 1
    finally:
        close_streams()
    return 0


class _Terminated(SystemExit):
    """SIGTERM, or SIGHUP, has ended a command that has no handler of its own."""


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends a command by an exception, so that it ends what it has started; and the end of
    the terminal (SIGHUP) is a SIGTERM, unless nohup ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise _Terminated

    old = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        old[signal.SIGHUP] = signal.signal(
            signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM)
        )
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


_FIXES = {
    getattr(errno, name): fix
    for names, fix in {
        "EROFS EACCES EPERM": "fix its permissions, or use another place",
        "ENOSPC EDQUOT": "make room, or use another place",
        "EMFILE ENFILE": "allow more open files (ulimit -n)",
        "ENOMEM EAGAIN": "end other programs, or raise the limits of this shell (ulimit -a)",
    }.items()
    for name in names.split()
}


def _about_machine(error: Exception) -> str:
    """What this machine refuses, in a sentence; empty for an error of another kind."""
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return f"There is not enough memory: {_FIXES[errno.ENOMEM]}."
    if not isinstance(error, OSError) or error.errno not in _FIXES:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}: {_FIXES[error.errno]}."


def _run(name: str, arguments: Sequence[str]) -> None:
    function = find(COMMANDS[name])
    if {"-h", "--help", "--help-all"} & set(arguments):
        options = find(OPTIONS[name])(arguments) if name in OPTIONS else function_options(function)
        examples = [line for line in EXAMPLES.splitlines() if line.split(" ")[0] == name]
        say(help_of(name, function, options, examples, everything="--help-all" in arguments))
        return
    result = function(arguments) if name in OPTIONS else call(name, function, arguments)
    if result is not None:
        say(result)


def find(path: str) -> Callable[..., Any]:
    """A function of this package."""
    return cast(Callable[..., Any], load_object(f"dreamfleet.{path}"))


def _usage() -> str:
    """Every command with the first line of its docstring; none is imported for this."""
    rows = ""
    for command, path in COMMANDS.items():
        module, _, name = path.partition(":")
        file = Path(dreamfleet.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        (function,) = (
            each
            for each in ast.parse(file.read_text()).body
            if isinstance(each, ast.FunctionDef) and each.name == name
        )
        rows += f"  {command:<9}  {(ast.get_docstring(function) or '').splitlines()[0]}\n"
    return (
        f"usage: dreamfleet COMMAND [OPTIONS]\n\ncommands:\n{rows}\n"
        "'dreamfleet COMMAND --help' explains one. 'dreamfleet --version' tells the version."
    )
