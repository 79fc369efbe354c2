"""Steps per second of a whole fleet: environments, actor, replay and logger, with a random agent.

The peers step the same environments with nothing around them: no agent, no replay, no logger.
Gymnasium's AsyncVectorEnv and PufferLib's multiprocessing (if it is installed) have as many
processes as the fleet, with as many environments each; SyncVectorEnv steps all in one process. So
the ratio shows what the fleet's messages and its storage cost: all of a step of an environment that
returns fixed frames, and little of one that simulates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, closing
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks.report import Row, compare, scratch
from dreamfleet.cli.console import say
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet.factories import factories
from dreamfleet.metrics import read_jsonl
from dreamfleet.parallel import combined
from dreamfleet.presets import preset
from dreamfleet.replay import ReplayConfig

Peer = Callable[["Layout", float], float]
"""Steps per second of a layout, measured for some seconds."""


@dataclass(frozen=True)
class Layout:
    """Which environments share a process."""

    envs: int
    processes: int
    steps: int  # that a measurement takes
    task: str = "bundled:dummy"

    @property
    def each(self) -> int:
        return self.envs // self.processes

    def __str__(self) -> str:
        envs = (
            f"{self.envs} environments" if self.task == Layout.task else f"{self.envs} {self.task}"
        )
        if self.each == 1:
            return f"{envs}, a process each"
        return f"{envs} in {_count(self.processes)}"


LAYOUTS = (
    Layout(8, 1, 60_000),  # the default of `dreamfleet train`
    Layout(8, 8, 20_000),  # --envs-per-process 1, for heavy simulators
    Layout(64, 4, 80_000),
    Layout(256, 8, 80_000),
    Layout(8, 1, 10_000, "atari:pong"),
    Layout(8, 8, 10_000, "atari:pong"),
)
_PAGE, _IMAGE = 4096, 64 * 64 * 3


def run(quick: bool = False) -> Iterator[Row]:
    """The layouts that people run."""
    peers: dict[str, Peer] = {"AsyncVectorEnv": _async, "SyncVectorEnv": _sync}
    try:
        with scratch() as folder, chdir(folder):  # importing it leaves a link in the directory
            import pufferlib.emulation
            import pufferlib.vector
    except ImportError as error:
        say(f"PufferLib is no peer here: {error}")
    else:
        peers["PufferLib"] = partial(_puffer, pufferlib)
    for layout in (Layout(2, 1, 500), Layout(2, 2, 500)) if quick else LAYOUTS:
        yield from _compare(layout, peers, 0.2 if quick else 2.0)


def _compare(layout: Layout, peers: Mapping[str, Peer], seconds: float) -> Iterator[Row]:
    # The peers before and after, because a machine's speed drifts.
    before = [peer(layout, seconds) for peer in peers.values()]
    _touch_memory(2 * layout.steps * _IMAGE)
    with scratch() as folder:
        rate, first = _fleet(folder, layout, every=min(1.0, seconds))
    after = [peer(layout, seconds) for peer in peers.values()]
    note = "images, random agent, replay and logger on, train_ratio 1"
    for name, *rates in zip(peers, before, after, strict=True):
        processes = _count(1 if name == "SyncVectorEnv" else layout.processes)
        yield compare(
            str(layout), rate, "steps/s", f"{name}, {processes}", statistics.mean(rates), note
        )
    if first:
        yield Row(f"{layout}: first steps", first, "s", note="from the start of the run")


def _touch_memory(size: int) -> None:
    """A virtual machine gets each page from its host when it is first touched, which takes 7 us
    instead of 1.3 us here. A run that has used its memory once does not pay for that again."""
    np.empty(size, np.uint8)[::_PAGE] = 1


def _count(processes: int) -> str:
    return "one process" if processes == 1 else f"{processes} processes"


def _fleet(logdir: Path, layout: Layout, every: float) -> tuple[float, float | None]:
    """Steps per second, the median over intervals, and seconds until the first steps."""
    config = RunConfig(
        task=layout.task,
        logdir=logdir,
        agent="random",
        envs=layout.envs,
        envs_per_process=layout.each,
        actor_batch=preset("default").actor_batch,
        train_ratio=1.0,
        replay=ReplayConfig(capacity=100_000),
        steps=layout.steps,
        log_every=every,
        report_every=0.0,  # a video costs little in five minutes, and a tenth of these seconds
        on_failure="stop",
    )
    begin = time.monotonic()
    seen: list[float] = []

    def say(line: str) -> None:
        if not line.startswith("step 0") and line.startswith("step"):
            seen.append(time.monotonic() - begin)

    combined(**vars(factories(config)), args=config, say=say)
    key = "actor/steps_per_second"
    rates = [float(row[key]) for row in read_jsonl(logdir / "metrics.jsonl") if key in row]
    # Until the environments have come up there are no steps, and the next interval is not full.
    moving = list(dropwhile(lambda rate: rate == 0.0, rates))
    return statistics.median(moving[1:] or moving), seen[0] if seen else None


class _Bare(gymnasium.Env[dict[str, Any], Any]):
    """Environments that share a process, as one of gymnasium's; they reset themselves."""

    def __init__(self, task: str, count: int) -> None:
        self._envs = [make_env(task, seed=seed) for seed in range(count)]
        self._last = [True] * count
        seen = self._envs[0].step({"action": np.int32(0), "reset": True})
        self._keys = [key for key in seen if key in ("image", "vector")]
        self.observation_space = gymnasium.spaces.Dict(
            {key: _box(np.stack([seen[key]] * count)) for key in self._keys}
        )
        actions = int(self._envs[0].act_space["action"].high)
        self.action_space = gymnasium.spaces.MultiDiscrete([actions] * count)

    def reset(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        self._last = [True] * len(self._envs)
        return self.step(np.zeros(len(self._envs), int))[0], {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        seen = [
            env.step({"action": np.int32(each), "reset": last})
            for env, each, last in zip(self._envs, action, self._last, strict=True)
        ]
        self._last = [bool(obs["is_last"]) for obs in seen]
        stacked = {key: np.stack([obs[key] for obs in seen]) for key in self._keys}
        return stacked, float(sum(obs["reward"] for obs in seen)), False, False, {}


def _box(like: Any) -> gymnasium.spaces.Box:
    if like.dtype == np.uint8:
        return gymnasium.spaces.Box(0, 255, like.shape, np.uint8)
    return gymnasium.spaces.Box(-np.inf, np.inf, like.shape, like.dtype.type)


def _async(layout: Layout, seconds: float) -> float:
    makers = [partial(_Bare, layout.task, layout.each)] * layout.processes
    vector = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    return _rate(vector, layout.envs, seconds)


def _sync(layout: Layout, seconds: float) -> float:
    vector = SyncVectorEnv(
        [partial(_Bare, layout.task, 1)] * layout.envs, autoreset_mode=AutoresetMode.DISABLED
    )
    return _rate(vector, layout.envs, seconds)


def _puffer(pufferlib: Any, layout: Layout, seconds: float) -> float:
    made = pufferlib.vector.make(
        partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=partial(_Bare, layout.task, 1)),
        num_envs=layout.envs,
        backend=pufferlib.vector.Multiprocessing,
        num_workers=layout.processes,
        overwork=True,  # as many processes as the others; they busy-wait, so it needs the cores
    )
    return _rate(made, layout.envs, seconds)


def _rate(vector: Any, envs: int, seconds: float) -> float:
    with closing(vector):
        vector.reset()
        actions = vector.action_space.sample()
        begin, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            vector.step(actions)
            count += envs
        return count / elapsed
