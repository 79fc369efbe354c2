"""`dreamfleet COMMAND --help`: what it does, its options in groups, and examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dreamfleet.cli.options import Option, options_of, summary_of

EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "train": (
        ("train", "gym:CartPole-v1, on two cores"),
        ("train --task dmc:walker_walk", "another task"),
        ("train --task my_package.my_module:my_factory", "your own environment"),
        ("train --set dreamer.loss.entropy_scale=0.001", "any setting of docs/configuration.md"),
    ),
    "eval": (
        ("eval runs/gym-CartPole-v1 --episodes 20", "twenty fresh episodes"),
        (
            "eval runs/gym-CartPole-v1 --video play.mp4 --json result.json",
            "a video, and a table",
        ),
    ),
    "status": (("status runs/gym-CartPole-v1 --follow", "until Ctrl-C"),),
    "plot": (("plot runs/seed-0 runs/seed-1 --out curves.png", "seeds as mean and range"),),
    "check-env": (
        ("check-env gym:Pendulum-v1", "is it fit for an agent?"),
        ("check-env bundled:catch --options size=[32,32]", "with options"),
    ),
    "doctor": (("doctor", "what this machine has, and what it lacks"),),
    "bench": (("bench transport --quick", "does it run?"),),
}

_GROUPS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "train": {
        "what": ("task", "env_options", "preset", "agent", "seed", "logdir", "settings"),
        "when it ends": ("steps", "duration", "target_score", "eval_episodes"),
        "learning": ("train_ratio", "batch_size", "batch_length", "offline", "prefill"),
        "starting from another run": ("from_checkpoint", "from_checkpoint_regex"),
        "processes": ("launcher", "envs", "eval_envs", "envs_per_process", "on_failure"),
        "several machines": (
            *("actor_addr", "replay_addr", "logger_addr", "keys", "remote_envs", "remote_replay"),
        ),
        "what is written": ("log_every", "report_every", "save_every", "outputs"),
    },
}

_WIDEST = 100


def help_of(name: str, function: Callable[..., Any], defaults: Mapping[str, Any]) -> RenderableType:
    """The help of a command.

    Args:
        name: The command.
        function: What runs it.
        defaults: What an option that is not given stands for, where its own default is None.
    """
    options = options_of(function)
    places = [o.flag + (" ..." if o.values == "..." else "") for o in options if o.positional]
    usage = " ".join(["usage: dreamfleet", name, *places, "[OPTIONS]"])
    parts: list[RenderableType] = [Text(usage), Text(), Text(summary_of(function)), Text()]
    for title, members in _grouped(name, options):
        parts += [Text(title, style="bold"), _rows(members, defaults), Text()]
    if name in EXAMPLES:
        table = Table.grid(padding=(0, 3))
        # Of a command to be copied nothing may be cut off; what is said about it may wrap.
        table.add_column(no_wrap=True)
        for command, words in EXAMPLES[name]:
            table.add_row(Text(f"dreamfleet {command}"), Text(words, style="dim"))
        parts += [Text("examples", style="bold"), Padding(table, (0, 0, 0, 2), expand=False)]
    return Constrain(Group(*parts), _WIDEST)


def _grouped(name: str, options: Sequence[Option]) -> list[tuple[str, list[Option]]]:
    """Options by what they are about. Those that no group knows come last, never nowhere."""
    groups = [("arguments", [o for o in options if o.positional])]
    rest = {option.name: option for option in options if not option.positional}
    for title, names in _GROUPS.get(name, {}).items():
        groups.append((title, [rest.pop(each) for each in names if each in rest]))
    groups.append(("options", list(rest.values())))
    return [(title, members) for title, members in groups if members]


def _rows(options: Sequence[Option], defaults: Mapping[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=30)
    for option in options:
        words = Text(option.sentence)
        default = defaults.get(option.name) if option.default is None else option.default
        empty = (inspect.Parameter.empty, None, (), "", False)
        if not option.positional and default not in empty:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            words.append(f" ({shown})", style="dim")
        values = "" if option.positional else f" {option.values}"
        table.add_row(Text(f"{option.flag}{values}", style="cyan"), words)
    return Padding(table, (0, 0, 0, 2), expand=False)
