"""What a run's parts are made of, from its configuration.

A module of its own, because the factories are looked up by name in processes that should load
little.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from dreamfleet.agents.api import Agent
from dreamfleet.blueprint import Blueprint
from dreamfleet.config import RunConfig
from dreamfleet.envs import env_seed, make_env
from dreamfleet.fleet.offline import AdoptedReplay, find_source, take_over
from dreamfleet.metrics import (
    JsonlOutput,
    MediaOutput,
    Output,
    Outputs,
    TensorBoardOutput,
    WandbOutput,
)
from dreamfleet.replay import Replay, Stream


def factories(config: RunConfig) -> dict[str, Callable[..., Any]]:
    """The arguments of `combined` for a configuration."""
    return {
        "make_agent": partial(agent, config),
        "make_replay_train": partial(replay, config, "replay"),
        "make_replay_eval": partial(replay, config, "eval_replay"),
        "make_env_train": partial(environment, config),
        "make_env_eval": partial(environment, config),
        "make_stream": partial(stream, config),
        "make_logger": partial(logger, config),
    }


def environment(config: RunConfig, envid: int) -> Any:
    seed = env_seed(config.seed, envid)
    return make_env(config.task, seed=seed, **config.env_options)


def agent(config: RunConfig) -> Agent:
    if config.offline:
        return replace(find_source(config.prefill[0]).blueprint, config=config).build()
    env = make_env(config.task, **config.env_options)
    obs_space, act_space = env.obs_space, env.act_space
    env.close()
    return Blueprint(config, obs_space, act_space).build()


def replay(config: RunConfig, name: str) -> Replay:
    make: Callable[..., Replay] = Replay
    if config.offline and name == "replay":
        make = partial(AdoptedReplay, find_source(config.prefill[0]).blueprint, config)
    made = make(
        config.window,
        config.replay_capacity,
        config.logdir / name,
        chunk=config.replay_chunk,
        seed=config.seed,
    )
    if name == "replay":
        take_over(made, config)
    return made


def stream(config: RunConfig, buffer: Replay, mode: Any) -> Stream:
    length = config.batch_length if mode == "train" else config.report_length
    source = partial(buffer.sample, config.batch_size, mode)
    return Stream(source, length, context=config.dreamer.execution.replay_context)


def logger(config: RunConfig) -> Outputs:
    made: dict[str, Callable[[], Output]] = {
        "jsonl": lambda: JsonlOutput(config.logdir / "metrics.jsonl"),
        "media": lambda: MediaOutput(config.logdir / "media"),
        "tensorboard": lambda: TensorBoardOutput(config.logdir / "tensorboard"),
        "wandb": lambda: WandbOutput(
            project="dreamfleet",
            name=config.logdir.name,
            dir=str(config.logdir),
            # The same directory goes on in the same place.
            id=blake2b(str(config.logdir.absolute()).encode(), digest_size=8).hexdigest(),
            resume="allow",
            config=json.loads(config.to_json()),
            # A run that goes on may have another end, or other intervals.
            allow_val_change=True,
        ),
    }
    return Outputs([made[name]() for name in config.outputs])
