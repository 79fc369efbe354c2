"""Steps that other runs have collected: to start with, or to learn from without environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dreamfleet.config import CONFIG_FILE, RunConfig
from dreamfleet.datasets import PREFIX, dataset_source, is_dataset
from dreamfleet.errors import ConfigError
from dreamfleet.policy import Blueprint, read_blueprint
from dreamfleet.replay import Replay
from dreamfleet.replay.reading import replay_directories
from dreamfleet.spaces import Space


@dataclass(frozen=True)
class Source:
    """Where another run keeps its steps, and what its checkpoint says about them."""

    directories: tuple[Path, ...]
    """One for each shard of its replay."""
    blueprint: Blueprint


def find_source(path: Path | str) -> Source:
    """The replay of a run's directory, or one of its replay directories, or a dataset
    (`minari:ID`)."""
    if is_dataset(path):
        converted, blueprint = dataset_source(path)
        return Source((converted,), blueprint)
    run, directories = Path(path), replay_directories(Path(path))
    if not directories:
        run = run.parent
        directories = [each for each in replay_directories(run) if each.name == Path(path).name]
    if not directories:
        raise ConfigError(
            f"{path} holds no replay and is no Minari dataset: name a run's directory."
        )
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


def check_sources(config: RunConfig) -> None:
    """Refuse steps that do not fit to each other, or to those that will be collected."""
    shares = config.pretrain or config.offline_fraction
    # A run that is resumed has copied the steps, whose sources may be gone.
    if shares and not config.prefill and not (config.logdir / CONFIG_FILE).exists():
        raise ConfigError("pretrain and offline_fraction use the steps of prefill: name sources.")
    # Without environments the first of them says what a step is.
    first = find_source(config.offline[0]).blueprint if config.offline else None
    if first and first.config.task != config.task:
        raise ConfigError(
            f"task={config.task} differs from the task of {config.offline[0]}, "
            f"{first.config.task}: leave it out."
        )
    ours = first.config if first else config
    for path in (*config.offline, *config.prefill):
        source = find_source(path)
        theirs = source.blueprint
        if source.directories[0].parent.resolve() == config.logdir.resolve():
            raise ConfigError(f"{path} is this run's own directory: choose another --logdir.")
        stored = first.stored_space if first else _stored_space(config, theirs)
        compared = [
            ("task", theirs.config.task, ours.task),
            ("shape of observations", theirs.obs_space, first and first.obs_space),
        ]
        if not is_dataset(path):  # which holds nothing of an agent
            compared += [
                ("agent", theirs.config.agent, ours.agent),
                ("size of the agent", theirs.stored_space, stored),
            ]
        for name, there, here in compared:
            if there != here and here is not None:
                others = f"those of {config.offline[0]}" if first else "new ones"
                raise ConfigError(
                    f"The steps of {path} were collected with another {name}, so they cannot be "
                    f"mixed with {others}: use the same, or train on them alone with --offline."
                )


def copy_steps(replay: Replay, config: RunConfig, shard: int = 0) -> None:
    """Copy what other runs have collected since this was last done into the replay; into a shard
    its share of it.

    What another agent stored with its steps is left out, and what this agent stores with its steps
    is zero, as at the start of an episode.
    """
    for path in (*config.offline, *config.prefill):
        source = find_source(path)
        theirs, ours = source.blueprint.stored_space, _stored_space(config, source.blueprint)
        changed = {} if theirs == ours else {"without": theirs, "zeros": ours}
        for directory in source.directories:
            replay.load_directory(directory, shard, config.replay_shards, **changed)
    if config.offline and config.replay_shards == 1 and not len(replay):
        raise nothing_to_learn_from(config)


def nothing_to_learn_from(config: RunConfig) -> ConfigError:
    """What is wrong with a run that has no steps and collects none."""
    sources = ", ".join((*config.offline, *config.prefill))
    return ConfigError(
        f"{sources} holds no sequence of {config.window} steps to learn from: use a shorter "
        "batch_length, or a run that has collected more."
    )


def _stored_space(config: RunConfig, source: Blueprint) -> Mapping[str, Space]:
    """What this run's agent stores with a step of that environment."""
    agent = config.agent_type
    settings = config.settings_of(agent)
    return agent.stored_space(source.obs_space, source.act_space, settings)
