"""Steps per second behind a network delay, and how much of the delay lanes hide.

An environment process, the role itself, steps environments that take 2 ms each as simulators do. It
is served through a proxy that delays bytes. The server only draws actions, so this measures how the
role spends its time. The peer is one lane at the same delay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.proxy import Proxy
from benchmarks.report import Row, compare, helper, rate_of, scratch
from dreamfleet.config import RunConfig
from dreamfleet.envs.bundled import Dummy
from dreamfleet.fleet.factories import factories
from dreamfleet.roles.env import parallel_env
from dreamfleet.spaces import RESET
from dreamfleet.transport import BatchServer

_ENVS, _STEP_SECONDS = 32, 0.002
_DELAYS = (0.0, 0.001, 0.020, 0.100)
_LANES = (1, 2, 4)
_WARM_UP = 4  # steps of each environment


class Slow(Dummy):
    """An environment whose steps take as long as those of a simulator."""

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(_STEP_SECONDS)
        return super().step(action)


def run(quick: bool = False) -> Iterator[Row]:
    """Several delays with several lanes."""
    seconds = 0.5 if quick else 5.0
    note = f"{_ENVS} environments in a process, {1000 * _STEP_SECONDS:g} ms per step"
    for delay in (0.0, 0.02) if quick else _DELAYS:
        one = 0.0
        for lanes in (1, 2) if quick else _LANES:
            rate = measure(delay, lanes, seconds)
            name = f"delay {1000 * delay:g} ms each way, lanes: {lanes}"
            one = one or rate
            if lanes == 1:
                yield Row(name, rate, "steps/s", note=note)
            else:
                yield compare(name, rate, "steps/s", "1 lane", one, note)


class _Counter:
    """Draws actions, and counts them."""

    def __init__(self) -> None:
        self.steps = 0
        self._rng = np.random.default_rng(0)

    def __call__(self, obs: dict[str, Any]) -> tuple[dict[str, Any], None]:
        count = len(obs["is_last"])
        self.steps += count
        return {"action": self._rng.integers(5, size=count), RESET: obs["is_last"]}, None


def measure(delay: float, lanes: int, seconds: float) -> float:
    """Steps per second of one environment process behind a delay of so many seconds each way."""
    counter = _Counter()
    server = BatchServer("tcp://127.0.0.1:{auto}", "actor")
    # As the actor has it, a batch is a lane.
    server.bind("act", counter, batch=-(-_ENVS // lanes), wait=0.02)
    with scratch() as folder, server, Proxy(server.address, delay) as proxy:
        config = RunConfig(
            task=f"{__name__}:Slow",
            env_options={"size": (4, 4)},
            logdir=folder,
            agent="random",
            envs=_ENVS,
            envs_per_process=_ENVS,
            env_lanes=lanes,
            actor_addr=proxy.address,
        )
        make = factories(config).make_env_train
        process = helper(parallel_env, make, list(range(_ENVS)), config)
        return rate_of(lambda: counter.steps, [process], _WARM_UP * _ENVS, seconds)
