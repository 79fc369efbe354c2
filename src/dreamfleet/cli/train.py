"""`dreamfleet train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli.console import say
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.fleet import combined
from dreamfleet.fleet.factories import agent as make_agent
from dreamfleet.fleet.factories import environment, factories
from dreamfleet.presets import preset as find_preset
from dreamfleet.roles.evaluate import evaluate

_EVAL_SEEDS_FROM = 1_000_000


def train(
    task: str | None = None,
    preset: str = "default",
    logdir: Path | None = None,
    steps: int | None = None,
    duration: float | None = None,
    seed: int | None = None,
    agent: Literal["dreamer", "random"] | None = None,
    envs: int | None = None,
    eval_envs: int | None = None,
    envs_per_process: int | None = None,
    train_ratio: float | None = None,
    batch_size: int | None = None,
    batch_length: int | None = None,
    log_every: float | None = None,
    save_every: float | None = None,
    on_failure: Literal["restart", "stop"] | None = None,
    eval_episodes: int = 10,
    actor_addr: str | None = None,
    replay_addr: str | None = None,
    logger_addr: str | None = None,
    keys: Path | None = None,
    remote_envs: bool | None = None,
    remote_replay: bool | None = None,
) -> None:
    """Train an agent with a fleet of processes. The same command again goes on where it ended.

    Without arguments it trains Dreamer on gym:CartPole-v1. What is not given is taken from the
    preset.

    Args:
        task: Such as gym:CartPole-v1, dmc:walker_walk or my_package.my_module:my_factory.
        preset: default (two cores), debug (tiny) or published (an accelerator).
        logdir: Where the run keeps everything; runs/TASK if not given.
        steps: Environment steps after which the run ends; 0 for no end.
        duration: Seconds after which the run ends; 0 for no end.
        seed: Of the agent, the environments and the replay's draws.
        agent: Who acts and learns.
        envs: Environments that collect training data.
        eval_envs: Environments whose data is kept apart.
        envs_per_process: Environments that share a process.
        train_ratio: Replayed steps trained on per environment step; 0 for no limit.
        batch_size: Sequences in a training batch.
        batch_length: Steps in a training sequence.
        log_every: Seconds between two lines and two writes of metrics.
        save_every: Seconds between two checkpoints.
        on_failure: Whether a process that fails is started again, or ends the run.
        eval_episodes: Episodes of the evaluation at the end; 0 for none.
        actor_addr: Where the actor listens, such as tcp://10.0.0.5:5551; others connect to it.
        replay_addr: Where the replay listens.
        logger_addr: Where the logger listens.
        keys: File of the run key, which tcp needs; made in the logdir if not given.
        remote_envs: Leave the environments out; start them with 'dreamfleet role env'.
        remote_replay: Leave the replay out; start it with 'dreamfleet role replay'.
    """
    given = {
        "task": task,
        "logdir": logdir,
        "steps": steps,
        "duration": duration,
        "seed": seed,
        "agent": agent,
        "envs": envs,
        "eval_envs": eval_envs,
        "envs_per_process": envs_per_process,
        "train_ratio": train_ratio,
        "batch_size": batch_size,
        "batch_length": batch_length,
        "log_every": log_every,
        "save_every": save_every,
        "on_failure": on_failure,
        "actor_addr": actor_addr,
        "replay_addr": replay_addr,
        "logger_addr": logger_addr,
        "keys": None if keys is None else str(keys),
        "remote_envs": remote_envs,
        "remote_replay": remote_replay,
    }
    config = _configure(preset, given)
    if eval_episodes < 0:
        raise ConfigError(f"--eval-episodes={eval_episodes} is negative: use 0 for none.")
    environment(config, 0).close()  # a task that cannot be made is said before anything starts
    say(f"Training {config.agent} on {config.task}; everything goes to {config.logdir}")
    combined(**factories(config), args=config, say=say)
    if eval_episodes:
        scores = _evaluate(config, eval_episodes)
        say(
            f"Evaluation: mean score {np.mean(scores):.4g} over {eval_episodes} episodes "
            f"(lowest {min(scores):.4g}, highest {max(scores):.4g})"
        )
    say(f"Results: {config.logdir} (metrics.jsonl, scores.jsonl, ckpt/agent, logs)")


def _configure(preset: str, given: Mapping[str, object]) -> RunConfig:
    base = find_preset(preset)
    chosen = {key: value for key, value in given.items() if value is not None}
    if "envs" in chosen or "eval_envs" in chosen:
        # The preset's batch was meant for its own number of environments.
        chosen.setdefault("actor_batch", 0)
    if "batch_length" in chosen:
        length = int(str(chosen["batch_length"]))
        chosen["report_length"] = min(base.report_length, length)
    if "logdir" not in chosen:
        name = str(chosen.get("task", base.task)).replace(":", "-").replace("/", "-")
        chosen["logdir"] = Path("runs") / name
    return dataclasses.replace(base, **chosen)  # type: ignore[arg-type]


def _evaluate(config: RunConfig, episodes: int) -> list[float]:
    """Scores of the saved agent in fresh environments of its own."""
    snapshot = Checkpoint(config.logdir / "ckpt" / "agent").load(["agent"])
    if snapshot is None:
        raise ConfigError(f"{config.logdir} holds no checkpoint to evaluate.")
    agent = make_agent(config)
    agent.load(snapshot.parts["agent"])
    played = evaluate(agent, lambda n: environment(config, _EVAL_SEEDS_FROM + n), episodes)
    return [episode.score for episode in played]
