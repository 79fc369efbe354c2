"""`dreamfleet sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from dreamfleet.cli.arguments import SettingsNamed
from dreamfleet.cli.console import say
from dreamfleet.cli.train import config_of
from dreamfleet.errors import ConfigError
from dreamfleet.settings import Count
from dreamfleet.statistics import mean_interval
from dreamfleet.sweep import Sweep, read_values, results

_NAMED = (
    *("task", "agent", "steps", "duration", "target_score", "eval_every", "eval_episodes"),
    *("train_ratio", "launcher", "envs"),
)


def sweep(
    seeds: str = "0",
    set: dict[str, Any] | None = None,  # noqa: A002 - the option's name
    trials: Count = 20,
    parallel: Count = 1,
    logdir: Path = Path("runs/sweep"),
    preset: str = "default",
    **settings: Annotated[Any, SettingsNamed(_NAMED)],
) -> None:
    """Train with several seeds, with every combination of values, or search within ranges.

    Each run is an ordinary one in a directory of its own. The same command again goes on with what
    is missing. Values with commas between them are a grid. A range, log(1e-5,1e-3), uniform(0,1) or
    int(1,8), is searched by Optuna, which stops runs that fall behind; a machine that sees the same
    directory helps with the same command.

    Args:
        seeds: Seeds that every setting is trained with, such as 0,1,2.
        set: Settings by their path, with one value, values, or a range.
        trials: Settings that a search tries.
        parallel: Runs at the same time.
        logdir: The directory of all runs.
        preset: Settings to start from.
        settings: Settings of every run.
    """
    try:
        numbers = [int(word) for word in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {seeds} is not valid: write whole numbers, 0,1,2.") from None
    words = [] if preset == "default" else ["--preset", preset]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    values = {path: read_values(path, value) for path, value in (set or {}).items()}
    for name in sorted({"seed", "logdir"} & values.keys()):
        raise ConfigError(f"--set {name} is not possible: use --seeds and --logdir.")
    made = Sweep(logdir, words, values, numbers, trials, parallel, say)
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
