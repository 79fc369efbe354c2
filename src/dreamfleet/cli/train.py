"""`dreamfleet train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dreamfleet.cli.arguments import Groups, Option, help_of, parse, setting_options
from dreamfleet.cli.console import out, say
from dreamfleet.config import RunConfig
from dreamfleet.display import live
from dreamfleet.presets import PRESETS
from dreamfleet.presets import preset as find_preset
from dreamfleet.training import configure
from dreamfleet.training import train as run

SUMMARY = """\
Train an agent with a fleet of processes. The same command again resumes the run.

Without arguments it trains Dreamer on gym:CartPole-v1. What is not given is taken from the
preset."""

EXAMPLES = (
    ("train", "gym:CartPole-v1, on two cores"),
    ("train --task dmc:walker_walk", "another task"),
    ("train --task my_package.my_module:my_factory", "your own environment"),
    ("train --dreamer.model 1m --dreamer.loss.entropy-scale 0.001", "settings of the agent"),
)

SHORT: Groups = {
    "what": ("task", "env_options", "preset", "agent", "seed", "logdir"),
    "when it ends": ("steps", "duration", "target_score", "eval_episodes"),
    "learning": ("train_ratio", "batch_size", "batch_length"),
    "starting from other runs": ("from_checkpoint", "prefill", "offline"),
    "processes": ("launcher", "envs", "eval_envs", "envs_per_process"),
    "what is written": ("outputs",),
}
"""The options that most people need."""

_PRESET = Option("preset", str, "default", f"Settings to start from: {', '.join(PRESETS)}.")
_SET = Option("set", dict, {}, "Settings by their path, such as dreamer.loss.horizon=100.")
_AGENT = Option("agent", str, None, "")


def train(arguments: Sequence[str]) -> None:
    """Train, with the settings that were typed."""
    options = options_of(arguments)
    if "--help-all" in arguments:
        say(help_of("train", SUMMARY, options, groups=_all_groups(options), examples=EXAMPLES))
        return
    if {"-h", "--help"} & set(arguments):
        footer = "'dreamfleet train --help-all' shows every setting, those of the agent as well."
        say(help_of("train", SUMMARY, options, groups=SHORT, examples=EXAMPLES, footer=footer))
        return
    run(config_of(arguments), say=say, display=partial(live, console=out, say=say))


def config_of(arguments: Sequence[str]) -> RunConfig:
    """The configuration that a command line stands for."""
    values = parse("train", options_of(arguments), arguments)
    preset, others = values.pop("preset", _PRESET.default), values.pop("set", {})
    return configure({**values, **others}, preset)


def options_of(arguments: Sequence[str]) -> list[Option]:
    """The options of a command line: the preset gives the defaults, and the agent its settings."""
    first: dict[str, Any] = parse("train", [_PRESET, _AGENT], arguments, strict=False)
    config = find_preset(first.get("preset", _PRESET.default))
    if "agent" in first:
        config = config.changed({"agent": first["agent"]})
    found = [
        # It follows from the task.
        replace(option, default=None) if option.name == "logdir" else option
        for option in setting_options(config)
    ]
    return [_PRESET, *found, _SET]


def _all_groups(options: Sequence[Option]) -> Groups:
    """The short groups, then the other settings of the run, then every group by its path."""
    groups: dict[str, list[str]] = {title: list(names) for title, names in SHORT.items()}
    shown = {name for names in groups.values() for name in names}
    for option in options:
        if option.name not in shown:
            path, _, _ = option.name.rpartition(".")
            groups.setdefault(path or "other settings of the run", []).append(option.name)
    return groups
