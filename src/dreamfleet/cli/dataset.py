"""`dreamfleet dataset export LOGDIR`."""

from __future__ import annotations

from pathlib import Path

from dreamfleet.cli.console import say
from dreamfleet.datasets import write_dataset
from dreamfleet.errors import ConfigError
from dreamfleet.replay.reading import replay_directories


def dataset(words: tuple[str, ...], /, out: Path = Path("dataset"), name: str = "") -> None:
    """Write the steps of a run as a Minari dataset.

    Nothing is lost. The folder is a source of 'train --offline' and 'train --prefill', and other
    programs read it with minari.MinariDataset(DIR/data).

    Args:
        words: The word export, and the run's directory.
        out: The folder to write.
        name: The dataset's id, such as cartpole/mine-v0; by the run's directory if not given.
    """
    if len(words) != 2 or words[0] != "export":
        raise ConfigError("Name the run: dreamfleet dataset export LOGDIR.")
    logdir = Path(words[1])
    directories = replay_directories(logdir)
    named = name or f"dreamfleet/{logdir.absolute().name}-v0"
    episodes, actions = write_dataset(logdir, out, directories, named)
    say(f"{episodes:,} episodes with {actions:,} actions are in {out}")
