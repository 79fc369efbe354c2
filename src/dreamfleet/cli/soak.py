"""`dreamfleet soak LOGDIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta
from rich.table import Table

from dreamfleet.benchmarks.soak import CRITERION, KINDS, Series, Soak
from dreamfleet.benchmarks.soak import soak as run
from dreamfleet.cli.console import say
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.resuming import holds_run
from dreamfleet.training import configure


def soak(
    logdir: Path,
    /,
    minutes: Annotated[float, Meta(gt=0)] = 60.0,
    task: str = "bundled:catch",
    preset: str = "pixels",
    agent: str = "dreamer",
    envs: Annotated[int, Meta(ge=1)] = 4,
    envs_per_process: Annotated[int, Meta(ge=1)] = 2,
    train_ratio: Annotated[float, Meta(gt=0)] = 8.0,
    capacity: Annotated[int, Meta(ge=1)] = 10_000,
) -> None:
    """Train at full speed and see whether a process grows: memory, files, sockets and threads.

    Writes soak.json and soak.png into the run's directory, and exits with code 1 if something grew.

    Args:
        logdir: The run's directory, which must not hold a run.
        minutes: How long.
        task: What to train on.
        preset: The settings of the run.
        agent: Who acts; random does not learn, and is over a minute sooner.
        envs: Environments.
        envs_per_process: So many in each process.
        train_ratio: Replayed steps for each step; with fewer, more travels between the processes.
        capacity: Steps in the replay, which has to be full after a quarter of the time.
    """
    if holds_run(logdir):
        raise ConfigError(f"{logdir} holds a run already: name another directory.")
    changes = {
        "logdir": logdir,
        "task": task,
        "agent": agent,
        "envs": envs,
        "envs_per_process": envs_per_process,
        "train_ratio": train_ratio,
        "replay.capacity": capacity,
        "steps": 0,
        "log_every": min(10.0, 60 * minutes / 40),
        "eval_episodes": 0,
    }
    found = run(configure(changes, preset), 60 * minutes, logdir / "soak")
    say(_table(found))
    say(CRITERION)
    say(f"picture        {logdir / 'soak.png'}")
    if grown := list(found.grown()):
        raise DreamfleetError(f"Not flat: {'; '.join(grown)}")


def _table(found: Soak) -> Table:
    title = f"{found.steps:,} steps in {found.duration / 60:.1f} minutes"
    table = Table("process", *KINDS, title=title, title_justify="left")
    for name, series in found.processes.items():
        cells = [_cell(series, kind, found.duration) for kind in KINDS]
        table.add_row(name, *cells)
    return table


def _cell(series: Series, kind: str, duration: float) -> str:
    """What there was in the second quarter, and how much more in the last."""
    before, more = series.growth(kind, duration)
    return f"{before:.0f} {KINDS[kind]}".rstrip() + f" {more:+.1f}"
