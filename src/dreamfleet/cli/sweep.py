"""`dreamfleet sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dreamfleet.cli.arguments import Option, parse_known
from dreamfleet.cli.console import say
from dreamfleet.cli.train import config_of
from dreamfleet.cli.train import options_of as train_options
from dreamfleet.errors import ConfigError
from dreamfleet.settings import Count, Section, convert
from dreamfleet.statistics import mean_interval
from dreamfleet.sweep import Sweep, read_values, results

_WHAT = frozenset({Section("what")})
_OWN = (
    Option("seeds", str, "0", "Seeds that every setting is trained with, such as 0,1,2.", _WHAT),
    Option("set", dict, {}, "Settings by their path, with one value, values, or a range.", _WHAT),
    Option("trials", Count, 20, "Settings that a search tries.", _WHAT),
    Option("parallel", Count, 1, "Runs at the same time.", _WHAT),
    Option("logdir", Path, Path("runs/sweep"), "The directory of all runs.", _WHAT),
)


def options_of(arguments: Sequence[str]) -> list[Option]:
    """The options of the help."""
    hidden = {"seed", "view", "print_config", *(option.path for option in _OWN)}
    return [*_OWN, *(option for option in train_options(arguments) if option.path not in hidden)]


def sweep(arguments: Sequence[str]) -> None:
    """Train with several seeds, with every combination of values, or search within ranges.

    Each run is an ordinary one in a directory of its own. The same command again goes on with what
    is missing. Values with commas between them are a grid. A range, log(1e-5,1e-3), uniform(0,1) or
    int(1,8), is searched by Optuna, which stops runs that fall behind; a machine that sees the same
    directory helps with the same command. All other options are those of 'dreamfleet train'.
    """
    typed, words = parse_known(_OWN, arguments)
    given: dict[str, Any] = {
        option.path: convert(option.flag, typed.get(option.path, option.value), option.type)
        for option in _OWN
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
            say(_table(logdir))


def _table(folder: Path) -> Table:
    """Settings, the best one first."""
    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for result in results(folder):
        groups.setdefault(tuple(sorted(result["setting"].items())), []).append(result)
    rows = []
    for setting, found in groups.items():
        scores = [each["score"] for each in found if each["score"] is not None]
        mean = mean_interval(scores) if scores else None
        ended = ", ".join(sorted({each["state"] for each in found}))
        label = ", ".join(f"{path}={value}" for path, value in setting) or "as given"
        rows.append((mean.value if mean else float("-inf"), label, len(found), mean, ended))
    table = Table("setting", "runs", "mean score [95 %]", "ended", box=None)
    for _, label, count, mean, ended in sorted(rows, key=lambda row: -row[0]):
        shown = "" if mean is None else f"{mean}" if count > 1 else f"{mean.value:.4g}"
        table.add_row(label, str(count), shown, ended)
    return table
