"""`dreamfleet train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dreamfleet.cli.arguments import Option, parse, parse_known, run_options, setting_options
from dreamfleet.cli.console import out, say
from dreamfleet.cli.view import page_beside
from dreamfleet.config import RunConfig
from dreamfleet.display import live
from dreamfleet.presets import PRESETS
from dreamfleet.presets import preset as find_preset
from dreamfleet.resuming import Start, read_settings, settings_text
from dreamfleet.settings import Section, read
from dreamfleet.training import train as run

_WHAT = frozenset({Section("what")})
_SHOWN = frozenset({Section("what is written and shown")})
_PRESETS = f"Settings of a new run: {', '.join(PRESETS)}. A size may follow, as in atari,size50m."
_CONFIG = (
    "A file of settings, YAML or JSON, as --print-config writes it. What is typed replaces them."
)
_PRINT = "Print every setting of the run as a file for --config, and train nothing."
_TRUST = "Import code outside of Dreamfleet that a config.json or the file of --config names."
_VIEW = "Also serve a page about the run, as 'dreamfleet view' does."
_OWN = (
    Option("preset", str, "default", _PRESETS, _WHAT),
    Option("config", Path, None, _CONFIG, _WHAT),
    Option("print_config", bool, False, _PRINT),
    Option("set", dict, {}, "Settings by their path, such as dreamer.loss.horizon=100."),
    Option("trust", bool, False, _TRUST),
    Option("view", bool, False, _VIEW, _SHOWN),
)
"""Options that are no settings of a run."""


def train(arguments: Sequence[str]) -> None:
    """Train an agent with a fleet of processes. The same command again resumes the run.

    Without arguments it trains Dreamer on gym:CartPole-v1. What is not given is taken from the
    preset, or, if the directory holds a run, from that run.
    """
    config, own = read_line(arguments)
    if own.get("print_config"):
        say(settings_text(config))
        return
    with page_beside(config.logdir) if own.get("view") else nullcontext():
        run(config, say=say, display=partial(live, console=out, say=say))


def read_line(arguments: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration that a command line stands for, and its options that are no settings.

    Which settings the agent has follows from the others, so words that belong to no setting of the
    run are left to the agent's.
    """
    options = [*_OWN, *run_options(RunConfig())]
    values, rest = parse_known(options, arguments)
    own = {option.path: values.pop(option.path) for option in _OWN if option.path in values}
    sets: dict[str, Any] = own.get("set", {})
    values |= _typed(sets, options)
    source = Path(own["config"]) if "config" in own else None
    file = read_settings(source) if source else {}
    preset, trust = own.get("preset", file.pop("preset", None)), own.get("trust", False)
    start = Start(values, preset, file, source, trust)
    theirs: dict[str, Any] = {path: sets[path] for path in sets if path not in values}
    if rest or theirs:
        agent = start.agent()
        of_agent = setting_options(agent.default(), f"{agent.name}.")
        theirs |= _typed(theirs, of_agent) | parse(of_agent, rest, options)
    return start.configure(theirs, say), own


def config_of(arguments: Sequence[str]) -> RunConfig:
    """The configuration that a command line stands for."""
    return read_line(arguments)[0]


def options_of(arguments: Sequence[str]) -> list[Option]:
    """The options of a command line, for a new run: the preset gives the defaults, and the agent
    its settings."""
    values, _ = parse_known([_OWN[0], Option("agent", str, None, "")], arguments)
    config = find_preset(values.pop("preset", "default")).changed(values)
    found = run_options(config)
    found += setting_options(config.agent_config, f"{config.agent_type.name}.")
    # The directory follows from the task.
    return [*_OWN, *(replace(o, value=None) if o.path == "logdir" else o for o in found)]


def _typed(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """Those of the values that are settings of these options, text as their types have it."""
    types = {option.path: option.type for option in options}
    return {
        path: read([value], types[path]) if isinstance(value, str) else value
        for path, value in values.items()
        if path in types
    }
