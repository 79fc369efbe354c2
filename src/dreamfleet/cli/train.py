"""The commands that take the settings of a run: `train`, `resume` and `sweep`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.cli.arguments import parse, parse_known, run_options
from dreamfleet.cli.console import out, say
from dreamfleet.config import RunConfig, read_config
from dreamfleet.errors import ConfigError
from dreamfleet.presets import PRESETS
from dreamfleet.presets import preset as find_preset
from dreamfleet.settings import Count, Section, Setting, convert, read

_WHAT = frozenset({Section("what")})
_SHOWN = frozenset({Section("what is written and shown")})
_PRESETS = f"Settings of a new run: {', '.join(PRESETS)}. A size may follow, as in atari,size50m."
_CONFIG = "A file of settings, YAML or JSON, as --print-config writes it. Flags override it."
_PRINT = "Print every setting as a file for --config, and train nothing."
_TRUST = "Import your own code that a config.json or the file of --config names."
_VIEW = "Also serve a page about the run, as 'dreamfleet view' does."
_OWN = (
    Setting("preset", str, "default", _PRESETS, _WHAT),
    Setting("config", Path, None, _CONFIG, _WHAT),
    Setting("print_config", bool, False, _PRINT),
    Setting("set", dict, {}, "Settings by their path, such as dreamer.loss.horizon=100."),
    Setting("trust", bool, False, _TRUST),
    Setting("view", bool, False, _VIEW, _SHOWN),
)
"""Options of `train` that are no settings of a run."""
_OF_SWEEP = (
    Setting("seeds", str, "0", "Seeds that every setting is trained with, such as 0,1,2.", _WHAT),
    Setting("set", dict, {}, "Settings by their path: a value, several, or a range.", _WHAT),
    Setting("trials", Count, 20, "Settings that a search tries.", _WHAT),
    Setting("parallel", Count, 1, "Runs at the same time.", _WHAT),
    Setting("logdir", Path, Path("runs/sweep"), "The directory of all runs.", _WHAT),
)


def train(arguments: Sequence[str]) -> None:
    """Train an agent with a fleet of processes. The same command again resumes the run.

    Without arguments it trains Dreamer on gym:CartPole-v1. Settings that you do not give
    come from the preset, or from the run if the directory holds one.
    """
    from dreamfleet.cli.commands import page_beside
    from dreamfleet.display import live
    from dreamfleet.resuming import settings_text
    from dreamfleet.training import train as run

    config, own = read_line(arguments)
    if own.get("print_config"):
        say(settings_text(config))
        return
    with page_beside(config.logdir) if own.get("view") else nullcontext():
        run(config, say=say, display=partial(live, console=out, say=say))


def resume(arguments: Sequence[str]) -> None:
    """Resume a run with its last settings.

    The options of 'dreamfleet train' change settings; each change is printed.
    """
    from dreamfleet.resuming import holds_run

    words = [word for word in arguments if word != "--logdir"]
    # The directory may stand before or after the options.
    for place, rest in ((0, words[1:]), (-1, words[:-1])):
        word = words[place] if words else "-"
        if not word.startswith("-") and (place == 0 or holds_run(Path(word))):
            read_config(Path(word))  # says so if there is no run
            train(["--logdir", word, *rest])
            return
    raise ConfigError("Name the run: dreamfleet resume LOGDIR.")


def sweep(arguments: Sequence[str]) -> None:
    """Train with several seeds, with every combination of values, or search within ranges.

    Each run is an ordinary one in a directory of its own. The same command again continues what is
    not complete. Values with commas between them are a grid. A range, log(1e-5,1e-3), uniform(0,1)
    or int(1,8), is searched by Optuna, which stops runs that fall behind. A machine that shares the
    directory can help with the same command. All other options are those of 'dreamfleet train'.
    """
    from dreamfleet.sweep import Sweep, read_values, table

    typed, words = parse_known(_OF_SWEEP, arguments)
    given: dict[str, Any] = {
        option.path: convert(option.flag, typed.get(option.path, option.value), option.type)
        for option in _OF_SWEEP
    }
    try:
        seeds = [int(word) for word in given["seeds"].split(",")]
    except ValueError:
        raise ConfigError(
            f"--seeds {given['seeds']} is not valid: write whole numbers, 0,1,2."
        ) from None
    values = {path: read_values(path, value) for path, value in given["set"].items()}
    for name in sorted({"seed", "logdir"} & values.keys()):
        raise ConfigError(f"--set {name} is not possible: use --seeds and --logdir.")
    logdir = given["logdir"]
    made = Sweep(logdir, words, values, seeds, given["trials"], given["parallel"], say)
    config_of(made.command(made.example())[1:])  # says what cannot work before anything is started
    try:
        made.start()
    finally:
        if logdir.is_dir():
            say(table(logdir))


def read_line(arguments: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration that a command line stands for, and its options that are no settings.

    Which agent it is follows from the settings, so what only your own agent knows is read last.
    """
    from dreamfleet.resuming import read_settings, resolve

    options = run_options(RunConfig())
    values, rest = parse_known([*_OWN, *options], arguments)
    own = {option.path: values.pop(option.path) for option in _OWN if option.path in values}
    kinds = {option.path: option.type for option in options}
    for path, value in own.pop("set", {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        values[path] = read([text], kinds.get(path, Any))
    source = Path(own["config"]) if "config" in own else None
    file = read_settings(source) if source else {}
    preset = own.get("preset", file.pop("preset", None))
    config = resolve(
        values,
        preset and convert("preset", preset, str),
        file=file,
        source=source,
        trust=own.get("trust", False),
        say=say,
        read_rest=lambda agent: parse([*_OWN, *run_options(RunConfig(agent=agent))], rest),
    )
    return config, own


def config_of(arguments: Sequence[str]) -> RunConfig:
    """The configuration that a command line stands for."""
    return read_line(arguments)[0]


def options_of(arguments: Sequence[str]) -> list[Setting]:
    """The options of a command line, for a new run: the preset gives the defaults, and the agent
    its settings."""
    values, _ = parse_known([_OWN[0], Setting("agent", str, None, "")], arguments)
    config = find_preset(values.pop("preset", "default")).changed(values)
    # The directory follows from the task.
    found = [replace(o, value=None) if o.path == "logdir" else o for o in run_options(config)]
    return [*_OWN, *found]


def resume_options(_: Sequence[str]) -> list[Setting]:
    """The options of `resume`. Their defaults are what the run has."""
    found = {option.path: replace(option, value=None) for option in options_of([])}
    del found["preset"]
    where: dict[str, Any] = {"positional": True, "value": inspect.Parameter.empty}
    found["logdir"] = replace(found["logdir"], help="The run's directory.", **where)
    found["trust"] = replace(found["trust"], marks=frozenset({Section("code of your own")}))
    return list(found.values())


def sweep_options(arguments: Sequence[str]) -> list[Setting]:
    """The options of `sweep`."""
    hidden = {"seed", "view", "print_config", *(option.path for option in _OF_SWEEP)}
    return [*_OF_SWEEP, *(each for each in options_of(arguments) if each.path not in hidden)]
