"""Small runs to dream of: a checkpoint, and a replay with some episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agent_worlds as worlds
import numpy as np

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.envs import env_seed, make_env, noop
from dreamfleet.policy import BLUEPRINT, Blueprint
from dreamfleet.replay import Replay
from dreamfleet.spaces import RESET, without_logs

STREAM = 2
"""The environment that played."""


def small_run(logdir: Path, task: str, steps: int, **options: Any) -> RunConfig:
    """A run whose agent has learned nothing, with this many steps of one environment. Its world
    model expects episodes to go on, as one that has learned does."""
    from dreamfleet.agents import Dreamer  # whose tests have shapes checked from its import on

    settings = {"task": task, "logdir": logdir, "env_options": options, "seed": 5}
    config = RunConfig(agent_config=worlds.config(), **settings)
    env = make_env(task, seed=env_seed(config.seed, STREAM), **options)
    agent = Dreamer(env.obs_space, env.act_space, config.agent_config, seed=3)
    saved = agent.save()
    saved["nets/cont/out/bias"] = saved["nets/cont/out/bias"] + 5
    parts = {"agent": saved, BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(logdir / "ckpt" / "agent").save(parts, step=70)
    (logdir / "config.json").write_text(config.to_json())
    with Replay(1, 10_000, logdir / "replay") as replay:
        carry, obs = agent.init_policy(1), env.step(noop(env.act_space))
        for number in range(steps):
            rows = {key: np.asarray(value)[None] for key, value in without_logs(obs).items()}
            carry, action, stored = agent.policy(carry, rows)
            replay.add_batch({**rows, **action, **stored}, [STREAM], "actor", number)
            taken = {key: value[0] for key, value in action.items()}
            obs = env.step({**taken, RESET: obs["is_last"]})
    env.close()
    return config
