"""`dreamfleet train`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from dreamfleet.cli.arguments import Groups, Option, help_of, parse, setting_options
from dreamfleet.cli.console import out, say
from dreamfleet.cli.view import page_beside
from dreamfleet.config import RunConfig
from dreamfleet.display import live
from dreamfleet.presets import PRESETS
from dreamfleet.presets import preset as find_preset
from dreamfleet.settings import read
from dreamfleet.training import configure
from dreamfleet.training import train as run

SUMMARY = """\
Train an agent with a fleet of processes. The same command again resumes the run.

Without arguments it trains Dreamer on gym:CartPole-v1. What is not given is taken from the
preset, or, if the directory holds a run, from that run."""

EXAMPLES = (
    ("train", "gym:CartPole-v1, on two cores"),
    ("train --task dmc:walker_walk", "another task"),
    ("train --task my_package.my_module:my_factory", "your own environment"),
    ("train --dreamer.model 1m --dreamer.loss.entropy-scale 0.001", "settings of the agent"),
)

SHORT: Groups = {
    "what": ("task", "env_options", "preset", "agent", "seed", "logdir"),
    "when it ends": ("steps", "duration", "target_score", "eval_episodes", "eval_every"),
    "learning": ("train_ratio", "batch_size", "batch_length"),
    "starting from other runs": ("from_checkpoint", "prefill", "offline"),
    "processes": ("launcher", "envs", "eval_envs", "envs_per_process"),
    "what is written and shown": ("outputs", "view"),
}
"""The options that most people need."""

_PRESET = Option(
    "preset",
    str,
    "default",
    f"Settings of a new run: {', '.join(PRESETS)}. A size may follow, as in atari,size50m.",
)
_SET = Option("set", dict, {}, "Settings by their path, such as dreamer.loss.horizon=100.")
_TRUST = Option(
    "trust", bool, False, "Import code of others that the config.json of a resumed run names."
)
_VIEW = Option("view", bool, False, "Also serve a page about the run, as 'dreamfleet view' does.")
_FIRST = ("agent", "logdir", "offline", "prefill", "task")
"""Settings that say which run it is, and by that which settings there are."""


def train(arguments: Sequence[str]) -> None:
    """Train, with the settings that were typed."""
    if {"-h", "--help", "--help-all"} & set(arguments):
        show_help("train", SUMMARY, options_of(arguments, new=True), EXAMPLES, arguments)
        return
    start(config_of(arguments), view=wants_page(arguments))


def start(config: RunConfig, *, view: bool = False) -> None:
    """Run a configuration, shown in the terminal, and in a browser if that is wanted."""
    with page_beside(config.logdir) if view else nullcontext():
        run(config, say=say, display=partial(live, console=out, say=say))


def wants_page(arguments: Sequence[str], command: str = "train") -> bool:
    """Whether a page was asked for."""
    return bool(parse(command, [_VIEW], arguments, strict=False).get("view"))


def config_of(arguments: Sequence[str], command: str = "train") -> RunConfig:
    """The configuration that a command line stands for."""
    options = options_of(arguments, command)
    values = parse(command, options, arguments)
    kinds = {option.name: option.kind for option in options}
    for path, value in values.pop("set", {}).items():
        typed = isinstance(value, str) and path in kinds
        values[path] = read([value], kinds[path]) if typed else value
    preset, trust = values.pop("preset", None), values.pop("trust", False)
    values.pop("view", None)
    return configure(values, preset, trust=trust, say=say)


def options_of(
    arguments: Sequence[str], command: str = "train", *, new: bool = False
) -> list[Option]:
    """The options of a command line: an existing run, or else the preset, gives the defaults, and
    the agent its settings.

    Args:
        arguments: What was typed.
        command: For messages.
        new: Leave a run that exists out.
    """
    plain = [option for option in setting_options(RunConfig()) if option.name in _FIRST]
    first: dict[str, Any] = parse(command, [_PRESET, _TRUST, *plain], arguments, strict=False)
    preset, trust = first.pop("preset", None), first.pop("trust", False)
    if new:
        config = find_preset(preset or _PRESET.default)
        config = config.changed({name: first[name] for name in ("agent",) if name in first})
    else:
        config = configure(first, preset, trust=trust, parts=False)  # for their defaults
    found = [
        # It follows from the task.
        replace(option, default=None) if option.name == "logdir" else option
        for option in setting_options(config)
    ]
    return [_PRESET, *found, _SET, _TRUST, _VIEW]


def show_help(
    command: str,
    summary: str,
    options: Sequence[Option],
    examples: Sequence[tuple[str, str]],
    arguments: Sequence[str],
    groups: Groups = SHORT,
) -> None:
    """The options that most people need, or all of them."""
    if "--help-all" in arguments:
        say(help_of(command, summary, options, groups=_all_groups(options), examples=examples))
    else:
        footer = f"'dreamfleet {command} --help-all' shows every setting, also of the agent."
        say(help_of(command, summary, options, groups=groups, examples=examples, footer=footer))


def _all_groups(options: Sequence[Option]) -> Groups:
    """The short groups, then the other settings of the run, then every group by its path."""
    groups: dict[str, list[str]] = {title: list(names) for title, names in SHORT.items()}
    shown = {name for names in groups.values() for name in names}
    for option in options:
        if option.name not in shown:
            path, _, _ = option.name.rpartition(".")
            groups.setdefault(path or "other settings of the run", []).append(option.name)
    return groups
