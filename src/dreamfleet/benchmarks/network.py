"""Environment steps a second over a network with delay, and how much of it lanes hide.

An environment process (the role itself) steps `bundled:audit`, whose steps take a while as those of
simulators do, and is served through a proxy that holds bytes up. The server only draws actions, so
what is measured is how the role spends its time. A step without any delay takes what the sleeps of
its environments take; the peer is one lane at the same delay.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dreamfleet.benchmarks.proxy import Proxy
from dreamfleet.benchmarks.report import Row, compare, helper, rate_of, scratch
from dreamfleet.config import RunConfig
from dreamfleet.fleet.factories import factories
from dreamfleet.roles.env import parallel_env
from dreamfleet.spaces import RESET
from dreamfleet.transport import BatchServer

_ENVS, _STEP_SECONDS = 32, 0.002
_DELAYS = (0.0, 0.001, 0.020, 0.100)
_LANES = (1, 2, 4)
_WARM_UP = 4  # steps of each environment


def run(quick: bool = False) -> list[Row]:
    """Measure steps a second at several delays with several lanes."""
    seconds = 0.5 if quick else 5.0
    note = f"{_ENVS} environments in a process, {1000 * _STEP_SECONDS:g} ms a step"
    rows: list[Row] = []
    for delay in (0.0, 0.02) if quick else _DELAYS:
        alone = 0.0
        for lanes in (1, 2) if quick else _LANES:
            rate = measure(delay, lanes, seconds)
            name = f"{1000 * delay:g} ms of delay each way, lanes: {lanes}"
            if lanes == 1:
                alone = rate
                rows.append(Row(name, rate, "steps/s", note=note))
            else:
                rows.append(compare(name, rate, "steps/s", "1 lane", alone, note=note))
    return rows


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
    """Steps a second of one environment process behind a delay of so many seconds each way."""
    counter = _Counter()
    server = BatchServer("tcp://127.0.0.1:{auto}", "actor")
    # As the actor has it, a batch is a lane.
    server.bind("act", counter, batch=-(-_ENVS // lanes), wait=0.02)
    with (
        scratch() as folder,
        server,
        Proxy(server.address, delay) as proxy,
    ):
        config = RunConfig(
            task="bundled:audit",
            env_options={"seconds": _STEP_SECONDS},
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
