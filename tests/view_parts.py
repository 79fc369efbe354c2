"""Runs that were made up, for the pages of `dreamfleet view`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet.record import RunStatus, WorkerStatus, write_record


def made_up_run(
    logdir: Path, *, episodes: int = 30, rows: int = 20, host: str = "there", **settings: Any
) -> Path:
    """The directory of a run that has ended."""
    logdir.mkdir(parents=True)
    config = RunConfig(logdir=logdir, **settings)
    (logdir / "config.json").write_text(config.to_json())
    worker = WorkerStatus("agent", "agent", "ended", None, "", 1000.0)
    write_record(logdir, RunStatus(1, 1.0, host, 1000.0, (worker,), "ended"))
    with (logdir / "scores.jsonl").open("w") as file:
        for number in range(episodes):
            row = {"step": 10 * (number + 1), "episode/score": float(number), "time": 5.0 * number}
            file.write(json.dumps(row) + "\n")
    with (logdir / "metrics.jsonl").open("w") as file:
        for number in range(rows):
            loss = 1 + math.cos(number / 7)
            row = {"step": 15 * (number + 1), "train/loss/value": loss, "learner/state": "training"}
            file.write(json.dumps(row) + "\n")
    return logdir


def made_up_sweep(folder: Path) -> None:
    """Two settings with two seeds each; one run is not over yet."""
    for size, seed in ((8, 0), (8, 1), (16, 0), (16, 1)):
        run = made_up_run(folder / f"batch_size={size},seed={seed}", batch_size=size, seed=seed)
        result = {"state": "complete", "score": 20.0 + 2 * seed, "seed": seed, "setting": {}}
        if size == 16:
            result |= {"state": "pruned", "score": 19.5}
        if (size, seed) != (16, 1):
            (run / "sweep.json").write_text(json.dumps(result))
    plan = {"train": [], "values": {"batch_size": "('8', '16')", "agent": "('dreamer',)"}}
    (folder / "sweep.json").write_text(json.dumps(plan, indent=2))


def save_random_agent(logdir: Path, step: int) -> None:
    """A checkpoint of a run that was made up; it can be evaluated."""
    from dreamfleet.agents import RandomAgent  # environments import this file, and stay small
    from dreamfleet.policy import BLUEPRINT, Blueprint

    config = RunConfig(logdir=logdir, agent="random", task="bundled:dummy", envs=2)
    env = make_env(config.task)
    agent = RandomAgent(env.obs_space, env.act_space)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save({**parts, "run": {"updates": 0}}, step=step)


class SlowDummy:
    """An environment that leaves the CPU to the browser."""

    def __init__(self, **options: Any) -> None:
        self._env = make_env("bundled:dummy", length=25, size=(8, 8))
        self.obs_space, self.act_space = self._env.obs_space, self._env.act_space

    def step(self, action: Mapping[str, Any]) -> Any:
        time.sleep(0.01)
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()
