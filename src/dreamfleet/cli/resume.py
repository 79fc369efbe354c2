"""`dreamfleet resume LOGDIR`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamfleet.cli import train as training
from dreamfleet.cli.arguments import Option
from dreamfleet.config import read_config
from dreamfleet.errors import ConfigError
from dreamfleet.resuming import holds_run
from dreamfleet.settings import Section


def resume(arguments: Sequence[str]) -> None:
    """Resume a run with the settings that it was last with.

    It takes the options of 'dreamfleet train', for settings to change; what is changed is said.
    """
    words = [word for word in arguments if word != "--logdir"]
    # The directory may stand before or after the options.
    for place, rest in ((0, words[1:]), (-1, words[:-1])):
        word = words[place] if words else "-"
        if not word.startswith("-") and (place == 0 or holds_run(Path(word))):
            read_config(Path(word))  # says so if there is no run
            training.train(["--logdir", word, *rest])
            return
    raise ConfigError("Name the run: dreamfleet resume LOGDIR.")


def options_of(_: Sequence[str]) -> list[Option]:
    """The options of the help. Their defaults are what the run has."""
    found = {option.path: replace(option, value=None) for option in training.options_of([])}
    del found["preset"]
    where: dict[str, Any] = {"positional": True, "value": inspect.Parameter.empty}
    found["logdir"] = replace(found["logdir"], help="The run's directory.", **where)
    found["trust"] = replace(found["trust"], marks=frozenset({Section("code of your own")}))
    return list(found.values())
