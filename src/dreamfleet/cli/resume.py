"""`dreamfleet resume LOGDIR`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dreamfleet.cli.train import options_of, run_line, show_help, wants_help
from dreamfleet.config import read_config
from dreamfleet.errors import ConfigError
from dreamfleet.resuming import holds_run
from dreamfleet.settings import Section

SUMMARY = """\
Resume a run with its last settings.

It takes the options of 'dreamfleet train', for settings to change, and prints each change."""

EXAMPLES = (
    ("resume runs/gym-CartPole-v1", "as it was"),
    ("resume runs/gym-CartPole-v1 --steps 60000", "and longer"),
)


def resume(arguments: Sequence[str]) -> None:
    """Resume a run, with the changes that were typed."""
    if wants_help(arguments):
        # Defaults are what the run has.
        options = {option.path: replace(option, value=None) for option in options_of([])}
        del options["preset"]
        options["logdir"] = replace(
            options["logdir"],
            positional=True,
            value=inspect.Parameter.empty,
            help="The run's directory.",
        )
        trust = frozenset({Section("code of your own")})
        options["trust"] = replace(options["trust"], marks=trust)
        show_help("resume", SUMMARY, [*options.values()], EXAMPLES, arguments)
        return
    logdir, rest = _directory(arguments)
    read_config(logdir)  # says so if there is no run
    run_line(["--logdir", str(logdir), *rest])


def _directory(arguments: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The run's directory, and the options; it may stand before or after them."""
    words = [word for word in arguments if word != "--logdir"]
    for place in (0, -1):
        word = words[place] if words else "-"
        if not word.startswith("-") and (place == 0 or holds_run(Path(word))):
            return Path(word), words[1:] if place == 0 else words[:-1]
    raise ConfigError("Name the run: dreamfleet resume LOGDIR.")
