"""Speed of the agent at size 1m: training, compiling, acting, memory.

The agent is made, compiled and called as the fleet does it, in a process with the fleet's
environment variables.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.agents import DreamerConfig, ExecutionConfig, find_agent, size_preset
from dreamfleet.benchmarks.report import Row, in_process, timed
from dreamfleet.spaces import Space

_ROWS = (1, 8, 16)


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    kind: str
    cache: str
    size: str = "1m"
    batch_size: int = 16
    batch_length: int = 64
    report_length: int = 32
    steps: int = 10
    calls: int = 500


def run(quick: bool) -> list[Row]:
    """Measure vectors and images, with an empty and with a filled compilation cache.

    A quick run only shows that everything works: its networks and batches are tiny.
    """
    rows: list[Row] = []
    for kind in ("vector", "image"):
        with tempfile.TemporaryDirectory() as cache:
            task = Task(kind, cache)
            if quick:
                task = Task(kind, cache, "debug", 2, 4, 4, steps=2, calls=20)
            cold = in_process(__name__, asdict(task))
            warm = in_process(__name__, asdict(replace(task, steps=0)))
        rows += [
            Row(f"{kind}: train step", cold["train"], "ms"),
            Row(f"{kind}: compile, cold", cold["compile"], "ms"),
            Row(f"{kind}: compile, warm cache", warm["compile"], "ms"),
            Row(f"{kind}: peak memory", cold["memory"], "MB"),
        ]
        for index, batch in enumerate(_ROWS):
            rows.append(Row(f"{kind}: policy, batch {batch}", cold["policy"][index], "ms"))
        for index, batch in enumerate(_ROWS):
            middle, high = cold["while_training"][index]
            note = f"99th percentile {high:.1f} ms"
            name = f"{kind}: policy while training, batch {batch}"
            rows.append(Row(name, middle, "ms", note=note))
    return rows


def measure(task: Task) -> dict[str, Any]:
    """All figures of one kind of observation, in milliseconds and megabytes.

    Without steps to measure, only the time it takes to compile.
    """
    obs, act = spaces(task.kind)
    config = DreamerConfig(size_preset(task.size), execution=ExecutionConfig(cache_dir=task.cache))
    agent: Any = find_agent("dreamer").make(obs, act, config, seed=0)
    start = time.perf_counter()
    agent.compile(
        batch_size=task.batch_size,
        batch_length=task.batch_length,
        report_length=task.report_length,
        policy_batches=_ROWS,
    )
    seconds = time.perf_counter() - start
    if not task.steps:
        return {"compile": 1e3 * seconds}
    step = learner_step(agent, task.batch_size, task.batch_length)
    step()
    step()
    return {
        "compile": 1e3 * seconds,
        "train": median(step, task.steps),
        "policy": [median(policy_caller(agent, obs, n), task.calls) for n in _ROWS],
        "while_training": _while_training(agent, obs, step, task.calls),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def spaces(kind: str) -> tuple[dict[str, Space], dict[str, Space]]:
    """24 floats or a 64x64x3 image in, 6 continuous actions out."""
    obs = {name: Space(bool) for name in ("is_first", "is_last", "is_terminal")}
    obs["reward"] = Space(np.float32)
    if kind == "vector":
        obs["vector"] = Space(np.float32, (24,))
    else:
        obs["image"] = Space(np.uint8, (64, 64, 3))
    return obs, {"action": Space(np.float32, (6,), -1, 1), "reset": Space(bool)}


def learner_step(agent: Any, batch_size: int, batch_length: int) -> Callable[[], None]:
    """A training step as the learner makes it, on the same batch again and again: results of the
    step before are read while this one runs."""
    carry = agent.init_train(batch_size)
    example = agent.example_batch(batch_size, batch_length)
    batches = agent.stream(itertools.repeat(random_batch(example)))
    previous: dict[str, Any] = {}

    def step() -> None:
        nonlocal carry, previous
        carry, outs, metrics = agent.train(carry, next(batches))
        for value in previous.values():
            np.asarray(value)
        previous = {**outs["replay"], **metrics}

    return step


def random_batch(example: Mapping[str, NDArray[Any]], seed: int = 0) -> dict[str, NDArray[Any]]:
    """A batch of noise in the form of another one."""
    batch, rng = dict(example), np.random.default_rng(seed)
    for name in ("vector", "action", "reward"):
        if name in batch:
            batch[name] = rng.standard_normal(batch[name].shape, np.float32)
    if "image" in batch:
        batch["image"] = rng.integers(256, size=batch["image"].shape, dtype=np.uint8)
    return batch


def policy_caller(agent: Any, obs: dict[str, Space], rows: int) -> Callable[[], None]:
    """A policy call for so many environments, again and again."""
    carry = agent.init_policy(rows)
    inputs = {name: np.zeros((rows, *s.shape), s.dtype) for name, s in obs.items()}

    def call() -> None:
        nonlocal carry
        carry, _, _ = agent.policy(carry, inputs)

    call()
    return call


def _while_training(
    agent: Any, obs: dict[str, Space], step: Callable[[], None], calls: int
) -> list[tuple[float, float]]:
    """(median, 99th percentile) of policy calls, 2 ms apart, while another thread trains."""
    stop = threading.Event()

    def learn() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=learn)
    thread.start()
    result = []
    for rows in _ROWS:
        call, taken = policy_caller(agent, obs, rows), []
        for _ in range(calls):
            taken += timed(call, 1)
            stop.wait(0.002)
        result.append((1e3 * float(np.median(taken)), 1e3 * float(np.percentile(taken, 99))))
    stop.set()
    thread.join()
    return result


def median(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds that a call takes."""
    return 1e3 * statistics.median(timed(call, repeats))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Task(**json.loads(sys.argv[1])))) + "\n")
