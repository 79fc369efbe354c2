"""The parts of a run, made from its configuration.

A module of its own, because the factories are looked up by name in processes that should load
little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents.api import Player
from dreamfleet.config import RunConfig
from dreamfleet.envs import env_seed, make_env
from dreamfleet.envs.registry import Task, by_number, make_lanes
from dreamfleet.metrics import (
    JsonlOutput,
    MediaOutput,
    MlflowOutput,
    Output,
    Outputs,
    PrometheusOutput,
    TensorBoardOutput,
    WandbOutput,
)
from dreamfleet.offline import find_source
from dreamfleet.policy import Spaces
from dreamfleet.replay import Replay, make_selector
from dreamfleet.roles.runtime import Factories
from dreamfleet.settings import load_object

MakeOutput = Callable[[Path], Output]
"""A class, or a function, that is given the directory of the run."""


def factories(
    config: RunConfig,
    env: Task | None = None,
    outputs: Sequence[MakeOutput] = (),
    spaces: tuple[Spaces, Spaces] | None = None,
) -> Factories:
    """What makes the parts of a run: its environments by `env` if its task alone does not tell, and
    more `outputs` than those of the configuration. Without `spaces` the agent makes an
    environment."""
    return Factories(
        make_agent=partial(agent, config, env, spaces),
        make_replay_train=partial(replay, config, "replay"),
        make_replay_eval=partial(replay, config, "eval_replay"),
        make_env_train=environments(config, env),
        make_env_eval=environments(config, env),
        make_stream=partial(stream, config),
        make_logger=partial(logger, config, outputs),
    )


def environments(config: RunConfig, env: Task | None) -> Callable[..., Any]:
    """Makes the run's environments by their number; see `environment`."""
    task = env or config.task
    return by_number(partial(environment, config, env), task, config.env_options)


def environment(
    config: RunConfig, env: Task | None, envid: int, attempt: int = 0, lanes: int = 0
) -> Any:
    """One of the run's environments, with a seed of its own; one that is built again after it has
    failed gets another seed, and plays other episodes. With `lanes` it holds so many."""
    seed = env_seed(config.host_seed, envid)
    if attempt:
        seed = env_seed(seed, attempt)
    if lanes:
        return make_lanes(env or config.task, lanes, seed=seed, **config.env_options)
    return make_env(env or config.task, seed=seed, **config.env_options)


def agent(
    config: RunConfig,
    env: Task | None = None,
    spaces: tuple[Spaces, Spaces] | None = None,
    actor: int = 0,
) -> Player:
    """A fresh agent for the spaces of the task, or what one of its further actors acts with.

    Where they are known, no environment is made: there may be one only, which is in use.
    """
    if config.offline:
        source = find_source(config.offline[0]).blueprint
        obs_space, act_space = source.obs_space, source.act_space
    elif spaces is not None:
        obs_space, act_space = spaces
    else:
        made = make_env(env or config.task, **config.env_options)
        obs_space, act_space = made.obs_space, made.act_space
        made.close()
    kind = config.agent_type
    settings = kind.for_run(config.settings_of(kind), config.updates)
    if actor:  # with random numbers of its own
        seed = env_seed(config.seed, actor)
        return kind.make_player(obs_space, act_space, kind.for_actor(settings), seed=seed)
    return kind.make(obs_space, act_space, settings, seed=config.seed)


def replay(config: RunConfig, name: str, shard: int = 0) -> Replay:
    """The replay of training data (`replay`) or of evaluation data (`eval_replay`); with several
    shards, one of them."""
    held, most = _share(config, name, shard), config.replay.max_bytes
    window, capacity = config.window, config.replay.capacity
    if name == "eval_replay":
        window = config.report_window + config.context
        capacity = config.replay.evaluation_capacity
    return Replay(
        window,
        math.ceil(capacity * held),
        config.logdir / (f"{name}-{shard}" if shard else name),
        chunk=config.replay.chunk,
        online=config.replay.online,
        selector=make_selector(config.replay) if name == "replay" else None,
        seed=config.host_seed + (shard << 64),
        max_bytes=None if most is None else math.ceil(most * held),
        mark_cut_short=True,
    )


def _share(config: RunConfig, name: str, shard: int) -> Fraction:
    """How much of the capacity is for a shard: as much as it has of the run's environments, so that
    steps stay equally long in all of them."""
    first, end = (0, config.envs) if name == "replay" else (config.envs, config.all_envs)
    mine = len([n for n in range(first, end) if n % config.replay_shards == shard])
    # Of those that join, each shard gets as many as the others.
    others = name == "replay" and config.bind and (config.remote_envs or end < config.replay_shards)
    if not mine or config.offline or others:
        return Fraction(1, config.replay_shards)
    return Fraction(mine, end - first)


def stream(config: RunConfig, buffer: Replay, mode: Any) -> Iterator[dict[str, NDArray[Any]]]:
    """Batches of a buffer for training, reports or evaluation; reports use the first part of the
    sequences. It goes on after an error, such as that there are no sequences yet."""
    length = config.batch_length if mode == "train" else config.report_window

    def batch() -> dict[str, NDArray[Any]]:
        window, steps = buffer.sample(config.host_batch, mode), config.context + length
        return {key: np.ascontiguousarray(value[:, :steps]) for key, value in window.items()}

    return iter(batch, None)  # which never comes


def logger(config: RunConfig, more: Sequence[MakeOutput] = ()) -> Outputs:
    """All outputs of the run's metrics; those of the user's are given the run's directory."""
    settings = {each.path: each.value for each in config.settings()}
    made: dict[str, Callable[[], Output]] = {
        "jsonl": lambda: JsonlOutput(config.logdir / "metrics.jsonl"),
        "media": lambda: MediaOutput(config.logdir / "media"),
        "tensorboard": lambda: TensorBoardOutput(config.logdir / "tensorboard", settings=settings),
        "mlflow": lambda: MlflowOutput(config.logdir, settings=settings),
        "wandb": lambda: WandbOutput(
            project="dreamfleet",
            name=config.logdir.name,
            dir=str(config.logdir),
            # The same directory resumes in the same place.
            id=blake2b(str(config.logdir.absolute()).encode(), digest_size=8).hexdigest(),
            resume="allow",
            config=json.loads(config.to_json()),
            # A run that resumes may have another end, or other intervals.
            allow_val_change=True,
        ),
    }
    names = [name for name in config.outputs if name not in made]
    own = [*(cast(MakeOutput, load_object(name)) for name in names), *more]
    ours = [made[name]() for name in config.outputs if name in made]
    if config.metrics_port:
        ours.append(PrometheusOutput(config.metrics_port, {"run": config.logdir.name}))
    return Outputs([*ours, *(make(config.logdir) for make in own)])
