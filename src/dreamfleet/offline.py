"""Steps that other runs have collected: to start with, or to learn from without environments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.config import CONFIG_FILE, RunConfig
from dreamfleet.datasets import PREFIX, dataset_source, is_dataset
from dreamfleet.errors import ConfigError
from dreamfleet.policy import Blueprint, read_blueprint
from dreamfleet.replay import Replay
from dreamfleet.spaces import Space

_REPLAY = re.compile(r"replay(-\d+)?")


@dataclass(frozen=True)
class Source:
    """Where another run keeps its steps, and what its checkpoint says about them."""

    directories: tuple[Path, ...]
    """One for each shard of its replay."""
    blueprint: Blueprint


def find_source(path: Path | str, config: RunConfig | None = None) -> Source:
    """The replay of a run's directory, or one of its replay directories, or a dataset.

    Args:
        path: The directory, or `minari:ID`.
        config: The run that mixes these steps with its own.

    Raises:
        ConfigError: There is none, or no checkpoint says what its steps mean.
    """
    if is_dataset(path):
        converted, blueprint = dataset_source(path, config)
        return Source((converted,), blueprint)
    given = Path(path)
    run = given.parent if _REPLAY.fullmatch(given.name) else given
    directories = replay_directories(run)
    if run != given:
        directories = [each for each in directories if each.name == given.name]
    if not directories:
        raise ConfigError(f"{given} holds no replay: name a run's directory.")
    known = read_blueprint(run)
    if known is None:
        raise ConfigError(
            f"{run} has no checkpoint, which would say what its steps mean: name the directory of "
            "a run that has saved."
        )
    return Source(tuple(directories), known)


def offline_logdir(source: str) -> Path:
    """Where a run that learns from this source is kept, if nothing else is said."""
    name = source.removeprefix(PREFIX)
    return Path(f"{source}-offline") if name == source else Path("runs", f"{name}-offline")


def replay_directories(run: Path) -> list[Path]:
    """Where a run keeps its steps: a directory for each shard."""
    found = run.iterdir() if run.is_dir() else ()
    return sorted(each for each in found if _REPLAY.fullmatch(each.name) and each.is_dir())


def check_sources(config: RunConfig) -> None:
    """Refuse steps that do not fit to each other, or to those that will be collected.

    Raises:
        ConfigError: Another agent, or one of another size, has collected them.
    """
    shares = config.pretrain or config.offline_fraction
    # A run that is resumed has copied the steps, whose sources may be gone.
    if shares and not config.prefill and not (config.logdir / CONFIG_FILE).exists():
        raise ConfigError("pretrain and offline_fraction use the steps of prefill: name sources.")
    # Without environments the first of them says what a step is.
    first = find_source(config.offline[0]).blueprint if config.offline else None
    if first and first.config.task != config.task:
        raise ConfigError(
            f"task={config.task} is not what the steps of {config.offline[0]} are of: leave it "
            f"out, and it is {first.config.task}."
        )
    ours = first.config if first else config
    for path in (*config.offline, *config.prefill):
        source = find_source(path, None if config.offline else config)
        theirs = source.blueprint
        if source.directories[0].parent.resolve() == config.logdir.resolve():
            raise ConfigError(f"{path} is this run's own directory: choose another --logdir.")
        stored = first.stored_space if first else _stored_space(config, theirs)
        for name, there, here in (
            ("task", theirs.config.task, ours.task),
            ("agent", theirs.config.agent, ours.agent),
            ("size of the agent", theirs.stored_space, stored),
            ("shape of observations", theirs.obs_space, first and first.obs_space),
        ):
            if there != here and here is not None:
                others = f"those of {config.offline[0]}" if first else "new ones"
                raise ConfigError(
                    f"The steps of {path} were collected with another {name}, so they cannot be "
                    f"mixed with {others}: use the same, or train on them alone with --offline."
                )


def copy_steps(replay: Replay, config: RunConfig, shard: int = 0) -> None:
    """Copy what other runs have collected since this was last done into the replay; into a shard
    its share of it.

    Raises:
        ConfigError: There is nothing to learn from, and nothing will come.
    """
    for path in (*config.offline, *config.prefill):
        for directory in find_source(path, None if config.offline else config).directories:
            replay.load_directory(directory, shard, config.replay_shards)
    if config.offline and config.replay_shards == 1 and not len(replay):
        raise nothing_to_learn_from(config)


def nothing_to_learn_from(config: RunConfig) -> ConfigError:
    """What is wrong with a run that has no steps and collects none."""
    sources = ", ".join((*config.offline, *config.prefill))
    return ConfigError(
        f"{sources} holds no sequence of {config.window} steps to learn from: use a shorter "
        "batch_length, or a run that has collected more."
    )


class AdoptedReplay(Replay):
    """A replay whose steps another agent has collected.

    What that agent stored with its steps is left out, and what this agent stores with its steps is
    zero, as at the start of an episode. Priorities are kept; updates of what is stored only if both
    agents store the same.
    """

    def __init__(self, blueprint: Blueprint, config: RunConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._columns = {*blueprint.obs_space, *blueprint.act_space, "stepid"}
        self._stored = _stored_space(config, blueprint)
        self._kept = bool(self._stored) and blueprint.stored_space == self._stored

    def sample(self, *args: Any, **options: Any) -> dict[str, NDArray[Any]]:
        window = super().sample(*args, **options)
        if self._kept:
            return window
        kept = {key: value for key, value in window.items() if key in self._columns}
        lead = window["stepid"].shape[:2]
        zeros = {k: np.zeros((*lead, *s.shape), s.dtype) for k, s in self._stored.items()}
        return {**kept, **zeros}

    def update(self, data: Any) -> int:
        if not self._kept:
            data = {key: value for key, value in data.items() if key in ("stepid", "priority")}
        return super().update(data) if len(data) > 1 else 0


def _stored_space(config: RunConfig, source: Blueprint) -> Mapping[str, Space]:
    """What this run's agent stores with a step of that environment."""
    agent = config.agent_type
    settings = config.settings_of(agent)
    return agent.stored_space(source.obs_space, source.act_space, settings)
