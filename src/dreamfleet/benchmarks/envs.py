"""How fast environments step, and what an environment process costs.

The peer of a Gymnasium task is the bare environment in a loop, so the ratio is what the contract
(unified dtypes, checked spaces, flags) costs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import gymnasium
import numpy as np

from dreamfleet.benchmarks.report import Row, calls_per_second, compare
from dreamfleet.envs import Env, MissingExtraError, make_env, noop, sample_action
from dreamfleet.spaces import RESET

_TASKS = (
    "bundled:dummy",
    "bundled:catch",
    "dmc:walker_walk",
    "atari:pong",
    "atari100k:pong",
    "crafter:reward",
    "minigrid:DoorKey-5x5-v0",
)

_PROCESS = """
from dreamfleet.envs import make_env, noop
env = make_env("bundled:dummy")
env.step(noop(env.act_space))
import psutil
print(psutil.Process().memory_info().rss)
"""


def run(quick: bool = False) -> list[Row]:
    """Measure how fast environments step."""
    seconds = 0.1 if quick else 2.0
    rows = [_compare_with_gymnasium(name, seconds) for name in ("CartPole-v1", "Pendulum-v1")]
    for task in _TASKS:
        try:
            env = make_env(task)
        except MissingExtraError as error:
            rows.append(Row(task, 0.0, "steps/s", note=f"not measured: {error}"))
            continue
        rows.append(Row(task, _steps_per_second(env, seconds), "steps/s"))
    return rows + _process(1 if quick else 5)


def _compare_with_gymnasium(name: str, seconds: float) -> Row:
    ours = _steps_per_second(make_env(f"gym:{name}"), seconds)
    bare = gymnasium.make(name, disable_env_checker=True)
    actions = [bare.action_space.sample() for _ in range(64)]
    bare.reset(seed=0)
    count = 0

    def step() -> None:
        nonlocal count
        _, _, terminated, truncated, _ = bare.step(actions[count % 64])
        count += 1
        if terminated or truncated:
            bare.reset()

    theirs = calls_per_second(step, seconds)
    return compare(f"gym:{name}", ours, "steps/s", "gymnasium, bare", theirs)


def _steps_per_second(env: Env, seconds: float) -> float:
    rng = np.random.default_rng(0)
    actions = [sample_action(env.act_space, rng) for _ in range(64)]
    obs = env.step(noop(env.act_space))
    count = 0

    def step() -> None:
        nonlocal obs, count
        obs = env.step({**actions[count % 64], RESET: obs["is_last"]})
        count += 1

    return calls_per_second(step, seconds)


def _process(repeats: int) -> list[Row]:
    times, memory = [], 0
    for _ in range(repeats):
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True
        )
        times.append(time.perf_counter() - start)
        memory = int(result.stdout)
    return [
        Row("process start to first step", statistics.median(times), "s"),
        Row("process memory", memory / 1e6, "MB", note="limit: 80"),
    ]
