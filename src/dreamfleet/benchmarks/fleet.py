"""How fast a whole fleet collects: environments, actor, replay and logger, with a random agent.

The peer is gymnasium's AsyncVectorEnv, stepping the same environments with nothing else around
them: no agent, no replay, no logger. What a fleet can reach of it is a fair measure of what its
messages and its storage cost.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from dreamfleet.benchmarks.report import Row, compare
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env, noop
from dreamfleet.fleet.factories import factories
from dreamfleet.metrics import read_jsonl
from dreamfleet.parallel import combined
from dreamfleet.replay import ReplayConfig
from dreamfleet.spaces import without_reset

_ENVS = 8
_TASK = "bundled:dummy"


def run(quick: bool = False) -> list[Row]:
    """Measure a whole fleet with the random agent."""
    steps = 4000 if quick else 120_000
    # The peer before and after, because a machine's speed drifts.
    seconds = 0.5 if quick else 6.0
    before = _async_vector_env(seconds)
    with tempfile.TemporaryDirectory(prefix="dreamfleet-bench-") as folder:
        rate, first = _fleet(Path(folder), steps, every=0.5 if quick else 2.0)
    peer = (before + _async_vector_env(seconds)) / 2
    note = "8 environments with 64x64x3 images, random agent, replay and logger on, train_ratio 1"
    rows = [Row("first steps", first, "s", note="from the start of the run")] if first else []
    return [
        compare("fleet", rate, "steps/s", "AsyncVectorEnv alone", peer, note=note),
        *rows,
    ]


def _fleet(logdir: Path, steps: int, every: float) -> tuple[float, float | None]:
    """Steps a second, the median over intervals, and seconds until steps were seen."""
    config = RunConfig(
        task=_TASK,
        logdir=logdir,
        agent="random",
        envs=_ENVS,
        envs_per_process=_ENVS,
        actor_batch=_ENVS,
        train_ratio=1.0,
        replay=ReplayConfig(capacity=100_000),
        steps=steps,
        log_every=every,
        on_failure="stop",
    )
    begin = time.monotonic()
    seen: list[float] = []

    def say(line: str) -> None:
        if not line.startswith("step 0") and line.startswith("step"):
            seen.append(time.monotonic() - begin)

    combined(**factories(config), args=config, say=say)
    key = "actor/steps_per_second"
    rates = [float(row[key]) for row in read_jsonl(logdir / "metrics.jsonl") if key in row]
    # Until the environments have come up there are no steps, and the next interval is not full.
    moving = list(dropwhile(lambda rate: rate == 0.0, rates))
    return statistics.median(moving[1:] or moving), seen[0] if seen else None


class _Bare(gymnasium.Env[dict[str, Any], Any]):
    """The same environment behind gymnasium's interface."""

    def __init__(self, seed: int) -> None:
        self._env = make_env(_TASK, seed=seed)
        self._reset = noop(without_reset(self._env.act_space))
        self.observation_space = gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8),
                "vector": gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float32),
            }
        )
        self.action_space = gymnasium.spaces.Discrete(5)

    def reset(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._seen(self._env.step(self._reset)), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        obs = self._env.step({"action": np.int32(action), "reset": False})
        return self._seen(obs), float(obs["reward"]), False, bool(obs["is_last"]), {}

    def _seen(self, obs: dict[str, Any]) -> dict[str, Any]:
        return {key: obs[key] for key in ("image", "vector")}


def _async_vector_env(seconds: float) -> float:
    envs = AsyncVectorEnv(
        [partial(_Bare, seed) for seed in range(_ENVS)], autoreset_mode=AutoresetMode.NEXT_STEP
    )
    try:
        envs.reset()
        actions = envs.action_space.sample()
        begin, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            envs.step(actions)
            count += _ENVS
        return count / elapsed
    finally:
        envs.close()
