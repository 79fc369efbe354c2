"""`dreamfleet resume LOGDIR`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dreamfleet.cli.train import SHORT, config_of, options_of, show_help, start, wants_page
from dreamfleet.config import read_config
from dreamfleet.errors import ConfigError
from dreamfleet.resuming import holds_run

SUMMARY = """\
Resume a run with the settings that it was last with.

It takes the options of 'dreamfleet train', for settings to change; what is changed is said."""

_EMPTY = inspect.Parameter.empty
EXAMPLES = (
    ("resume runs/gym-CartPole-v1", "as it was"),
    ("resume runs/gym-CartPole-v1 --steps 60000", "and longer"),
)


def resume(arguments: Sequence[str]) -> None:
    """Resume a run, with the changes that were typed."""
    if {"-h", "--help", "--help-all"} & set(arguments):
        options = [
            replace(option, positional=True, default=_EMPTY, sentence="The run's directory.")
            if option.name == "logdir"
            else replace(option, default=None)  # it is what the run has
            for option in options_of([], new=True)
            if option.name != "preset"
        ]
        groups = {"code of your own": ("trust",), **SHORT}
        show_help("resume", SUMMARY, options, EXAMPLES, arguments, groups)
        return
    logdir, rest = _directory(arguments)
    read_config(logdir)  # says so if there is no run
    config = config_of(["--logdir", str(logdir), *rest], "resume")
    start(config, view=wants_page(rest, "resume"))


def _directory(arguments: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The run's directory, and the options; it may stand before or after them."""
    words = [word for word in arguments if word != "--logdir"]
    for place in (0, -1):
        word = words[place] if words else "-"
        if not word.startswith("-") and (place == 0 or holds_run(Path(word))):
            return Path(word), words[1:] if place == 0 else words[:-1]
    raise ConfigError("Say which run it is: dreamfleet resume LOGDIR.")
