"""What a run stores, and settings to start a task with."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dreamfleet.agents.dreamer.config import SIZES, ModelConfig, size_preset
from dreamfleet.agents.dreamer.features import observed
from dreamfleet.config import RunConfig
from dreamfleet.presets import PRESETS
from dreamfleet.spaces import Space, without_logs, without_reset

Spaces = Mapping[str, Space]

PROCESS_BYTES = 0.04e9
"""A process of environments, before those."""
_QUICK = 1000.0
"""Steps a second that all environments of one process should make together."""
_STAGES = 16
"""What both sides of an image have to be a multiple of, for networks of four stages."""


def column_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> dict[str, int]:
    """Bytes of each key of a step in the replay."""
    agent = config.agent_type
    stored = agent.stored_space(obs_space, act_space, config.settings_of(agent))
    columns = {**without_logs(obs_space), **without_reset(act_space), **stored}
    return {key: space.dtype.itemsize * math.prod(space.shape) for key, space in columns.items()}


def step_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> int:
    """Bytes of a step in the replay."""
    tick = 8
    return tick + sum(column_bytes(config, obs_space, act_space).values())


def replay_bytes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> float:
    """Bytes of the files of both replays when they are full, or when the run ends."""
    replay, needed = config.replay, 0.0
    step = step_bytes(config, obs_space, act_space)
    # The evaluator's environments store nothing.
    for envs, capacity in (
        (config.envs, replay.capacity),
        (config.actor_envs - config.envs, replay.evaluation_capacity),
    ):
        # Every environment has a file of its own that is not full.
        collected = config.steps * envs / config.envs + envs * replay.chunk
        kept = min(collected, capacity) if config.steps else capacity * bool(envs)
        needed += min(kept * step, replay.max_bytes or math.inf)
    return needed


def notes(config: RunConfig, obs_space: Spaces, act_space: Spaces) -> list[str]:
    """Sentences about a run before it starts: its disk, and a preset that does not fit."""
    disk = replay_bytes(config, obs_space, act_space)
    found = [f"The replay takes up to {_bytes(disk)} of disk, mapped into memory as it is used."]
    images = any(space.image for space in observed(obs_space).values())
    if images and config.agent_config == PRESETS["default"].agent_config:
        found.append(
            "Warning: these are the settings for vectors, and the task has images: --preset pixels "
            "is for images."
        )
    return found


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@dataclass(frozen=True)
class Suggestion:
    """Settings for a task."""

    preset: str
    changes: Mapping[str, Any]
    config: RunConfig

    def command(self) -> str:
        """A line to paste."""
        words = ["dreamfleet", "train", "--task", self.config.task]
        words += ["--preset", self.preset] if self.preset != "default" else []
        for name, value in self.changes.items():
            words.append(f"--{name.replace('_', '-')}")
            words += _pairs(value) if isinstance(value, dict) else [f"{value:g}"]
        return shlex.join(words)


def _pairs(options: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in options.items()
    ]


def suggest(
    task: str,
    options: Mapping[str, Any],
    obs_space: Spaces,
    act_space: Spaces,
    *,
    steps_per_second: float = math.inf,
    disk: float = math.inf,
    single: bool = False,
) -> Suggestion:
    """Settings for a task, by rule: `pixels` for images, resized to 64x64 if they are larger or fit
    no network; `dmc_cpu` for dm_control; `default` for everything else. Slow environments are
    spread over the cores. A replay that the disk does not hold is cut.

    Args:
        task: Its name.
        options: Those that the environment was made with.
        obs_space: Of the environment.
        act_space: Of the environment.
        steps_per_second: That one environment makes.
        disk: Bytes that are free.
        single: Whether there can be only one environment.
    """
    images = [space for space in observed(obs_space).values() if space.image]
    preset = "pixels" if images else "dmc_cpu" if task.startswith("dmc:") else "default"
    base = PRESETS[preset]
    changes: dict[str, Any] = {}
    if single:
        changes["envs"] = 1
    elif steps_per_second < _QUICK / base.envs:
        changes["envs_per_process"] = -(-base.envs // max(1, cores()))
    given, seen = dict(options), dict(obs_space)
    if images and (size := _size(images, options)):
        given["size"] = size
        seen = {key: _resized(space, size) for key, space in obs_space.items()}
    own = {name: value for name, value in given.items() if base.env_options.get(name) != value}
    if own:
        changes["env_options"] = own

    def config() -> RunConfig:
        return base.changed({**changes, "task": task, "env_options": {**base.env_options, **own}})

    if replay_bytes(config(), seen, act_space) > 0.8 * disk:
        fitting = 0.8 * disk / step_bytes(config(), seen, act_space)
        digits = 10 ** max(0, len(str(int(fitting))) - 2)
        changes["replay.capacity"] = max(1, int(fitting) // digits * digits)
    return Suggestion(preset, changes, config())


def cores() -> int:
    """Cores that this process may use."""
    has = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1


def _size(images: list[Space], options: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size that images are resized to; None if they stay as they are."""
    height, width = images[0].shape[:2]
    same = all(image.shape[:2] == (height, width) for image in images)
    fits = same and not (height % _STAGES or width % _STAGES) and height * width <= 64**2
    return None if fits or "size" in options else (64, 64)


def _resized(space: Space, size: tuple[int, int]) -> Space:
    return Space(space.dtype, (*size, space.shape[2])) if space.image else space


def size_name(model: ModelConfig) -> str:
    """The name of a size, or its widths."""
    names = (name for name in SIZES if size_preset(name) == model)
    return next(names, f"deter {model.deter}, units {model.units}")
