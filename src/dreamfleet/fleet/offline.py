"""Steps that other runs have collected: to begin with, or to learn from without environments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.blueprint import Blueprint, read_blueprint
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.replay import Replay

_REPLAY = "replay"


@dataclass(frozen=True)
class Source:
    """Where another run keeps its steps, and who collected them."""

    directory: Path
    blueprint: Blueprint


def find_source(path: Path | str) -> Source:
    """The replay of a run's directory, or the replay directory itself.

    Raises:
        ConfigError: There is none, or no checkpoint beside it tells what its steps mean.
    """
    given = Path(path)
    run = given.parent if given.name == _REPLAY else given
    directory = run / _REPLAY
    if not directory.is_dir():
        raise ConfigError(f"{given} holds no replay: name a run's directory.")
    blueprint = read_blueprint(run)
    if blueprint is None:
        raise ConfigError(
            f"{run} has no checkpoint, which would tell what its steps mean: name the directory of "
            "a run that has saved."
        )
    return Source(directory, blueprint)


def check_prefill(config: RunConfig) -> None:
    """Refuse steps that do not fit to those that will be collected beside them.

    Raises:
        ConfigError: Another agent, or one of another size, has collected them.
    """
    # Without environments the first of them says what a step is.
    first = find_source(config.prefill[0]).blueprint if config.offline else None
    ours = first.config if first else config
    for path in config.prefill:
        source = find_source(path)
        theirs = source.blueprint.config
        if source.directory.resolve() == (config.logdir / _REPLAY).resolve():
            raise ConfigError(f"{path} is this run's own directory: choose another --logdir.")
        for name, there, here in (
            ("task", theirs.task, ours.task),
            ("agent", theirs.agent, ours.agent),
            ("dreamer.model", state_shapes(theirs), state_shapes(ours)),
            ("shape of observations", source.blueprint.obs_space, first and first.obs_space),
        ):
            if there != here and here is not None:
                beside = f"those of {config.prefill[0]}" if first else "new ones"
                raise ConfigError(
                    f"The steps of {path} were collected with another {name}, so they cannot lie "
                    f"beside {beside}: use the same, or train on them alone with --offline."
                )


def take_over(replay: Replay, config: RunConfig) -> None:
    """Copy in what other runs have collected since this was last done.

    Raises:
        ConfigError: There is nothing to learn from, and nothing will come.
    """
    for path in config.prefill:
        replay.load_directory(find_source(path).directory)
    if config.offline and not len(replay):
        raise ConfigError(
            f"{', '.join(config.prefill)} holds no sequence of {config.window} steps to learn "
            "from: use a shorter batch_length, or a run that has collected more."
        )


class AdoptedReplay(Replay):
    """A replay whose steps another agent has collected.

    What that agent stored with its steps is left out, and where states of this agent are missing
    they are zero, as at the beginning of an episode. States are written back only if they are kept.
    """

    def __init__(self, blueprint: Blueprint, config: RunConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys = {*blueprint.obs_space, *blueprint.act_space, "stepid"}
        self._states = state_shapes(config)
        theirs = state_shapes(blueprint.config)
        self._kept = bool(theirs) and theirs == self._states

    def sample(self, *args: Any, **options: Any) -> dict[str, NDArray[Any]]:
        window = super().sample(*args, **options)
        if self._kept:
            return window
        kept = {key: value for key, value in window.items() if key in self._keys}
        lead = window["stepid"].shape[:2]
        zeros = {k: np.zeros((*lead, *shape), np.float32) for k, shape in self._states.items()}
        return {**kept, **zeros}

    def update(self, data: Any) -> int:
        return super().update(data) if self._kept else 0


def state_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """What an agent stores with every step."""
    if config.agent != "dreamer":
        return {}
    model = config.dreamer.model
    return {"dyn/deter": (model.deter,), "dyn/stoch": (model.stoch, model.classes)}
