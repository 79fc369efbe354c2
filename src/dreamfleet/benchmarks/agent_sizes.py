"""What a training step and a policy call cost in each size, on whatever device is here.

Every size is measured in a process of its own, so that memory is its own, and one that does not fit
costs nothing but its row. FLOP utilisation is what the model needs (`lowering`) against the
fastest matrix product of the same precision that was measured in the same process. On a processor
both are taken by processor time, which other programs spoil little.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dreamfleet.agents import DreamerConfig, ExecutionConfig, find_agent, size_preset
from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES
from dreamfleet.benchmarks.agent import learner_step, median, policy_caller, spaces
from dreamfleet.benchmarks.report import in_process, scratch
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.errors import ConfigError, DreamfleetError

Kind = Literal["vector", "image"]
Precision = Literal["float32", "bfloat16"]
ROWS = (1, 16)
"""Environments in the policy calls that are measured."""
_SECONDS = 20.0
_MOST_STEPS = 10
_PRODUCTS = (1024, 2048, 4096, 8192)
_LONG_PRODUCT = 0.5
_PACKAGES = ("dreamfleet", "jax", "jaxlib", "equinox", "optax", "numpy")


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    size: str
    kind: Kind
    dtype: Precision
    batch_size: int = 16
    batch_length: int = 64


def sizes_of(text: str) -> tuple[str, ...]:
    """The sizes that were asked for: names between commas, or `all` published ones.

    Raises:
        ConfigError: One does not exist.
    """
    names = PUBLISHED_SIZES if text == "all" else tuple(text.split(","))
    for name in names:
        size_preset(name)
    return names


def run(tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """The figures of each size, as soon as they are there; a `problem` where there are none."""
    for task in tasks:
        yield {**asdict(task), **_found(task)}


def _found(task: Task) -> dict[str, Any]:
    try:
        return dict(in_process(__name__, asdict(task)))
    except DreamfleetError as error:
        return {"problem": str(error)}


def measure(task: Task, cache: str) -> dict[str, Any]:
    """All figures of one size, with an empty cache: seconds, bytes, operations."""
    obs, act = spaces(task.kind)
    execution = ExecutionConfig(cache_dir=cache, compute_dtype=task.dtype)
    config = DreamerConfig(size_preset(task.size), execution=execution)
    agent: Any = find_agent("dreamer").make(obs, act, config, seed=0)
    start = time.perf_counter()
    agent.compile(batch_size=task.batch_size, batch_length=task.batch_length, policy_batches=ROWS)
    compiled = time.perf_counter() - start
    step = learner_step(agent, task.batch_size, task.batch_length)
    step()
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    steps = int(min(_MOST_STEPS, max(2, _SECONDS / max(first, 1e-9))))
    busy = time.process_time()
    seconds = median(step, steps) / 1e3
    processor = (time.process_time() - busy) / steps
    policy = {str(rows): median(policy_caller(agent, obs, rows), 10 * steps) / 1e3 for rows in ROWS}
    checkpoint = _checkpoint(agent, step, seconds)
    found = this_device()
    cores = found["device"]["cores"] if found["device"]["platform"] == "cpu" else 0
    peak = matmul_flops(task.dtype, cores)
    from dreamfleet.benchmarks.lowering import train_step_flops

    memory = agent.memory()
    needed = train_step_flops(config, obs, act, task.batch_size, task.batch_length)
    return {
        **found,
        "steps": steps,
        "compile_seconds": compiled,
        "step_seconds": seconds,
        "step_processor_seconds": processor,
        "policy_seconds": policy,
        "memory": {**memory, "peak": _peak_bytes()},
        "checkpoint": checkpoint,
        "flops": needed,
        "matmul_flops": peak,
        "utilisation": needed / (processor / cores if cores else seconds) / peak,
    }


def _checkpoint(agent: Any, step: Callable[[], None], usual: float) -> dict[str, float]:
    """Seconds that a thread takes to write a checkpoint while training goes on, that the learner
    stands still for it, and how many times the usual a training step takes meanwhile."""
    with scratch() as folder, ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        state = agent.save_later()
        still = time.perf_counter() - start

        def write() -> float:
            Checkpoint(folder).save({"agent": state()}, step=0)
            return time.perf_counter() - start

        writing, steps = pool.submit(write), 0
        while not steps or not writing.done():
            step()
            steps += 1
        meanwhile = (time.perf_counter() - start - still) / steps
        return {"seconds": writing.result(), "still": still, "slower": meanwhile / usual}


def matmul_flops(dtype: Precision, cores: int) -> float:
    """Operations a second of the fastest square matrix product; on so many cores, if it is a
    processor, of which it has all the time that it uses."""
    import jax
    import jax.numpy as jnp

    best = 0.0
    product = jax.jit(lambda a: a @ a)
    for side in _PRODUCTS:
        x = jnp.ones((side, side), dtype)
        product(x).block_until_ready()
        busy = time.process_time()
        seconds = median(partial(_wait, product, x), 5) / 1e3
        if cores:
            seconds = (time.process_time() - busy) / 5 / cores
        best = max(best, 2.0 * side**3 / seconds)
        if seconds > _LONG_PRODUCT:
            break
    return best


def _wait(function: Any, argument: Any) -> None:
    function(argument).block_until_ready()


def this_device() -> dict[str, Any]:
    """What computes, what drives it, and the versions of all that has a part in it."""
    import jax

    there = jax.devices()
    first: Any = there[0]
    device = {
        "platform": first.platform,
        "kind": _processor() if first.platform == "cpu" else first.device_kind,
        "count": len(there),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "driver": _driver(first),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {"device": device, "versions": versions}


def _driver(first: Any) -> str:
    """As JAX and the system name it; a processor has none."""
    if first.platform == "cpu":
        return "none"
    words = [" ".join(str(first.client.platform_version).split())]
    nvidia = Path("/proc/driver/nvidia/version")
    if first.platform == "gpu" and nvidia.is_file():
        words.append(nvidia.read_text().splitlines()[0].strip())
    return "; ".join(words)


def _processor() -> str:
    """The name of this processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _peak_bytes() -> float:
    """The most memory that was in use: of the device, or of this process if the device has none."""
    import jax

    counted = jax.devices()[0].memory_stats() or {}
    return float(
        counted.get("peak_bytes_in_use")
        or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


# --- as a table ----------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "size": lambda found: found["size"],
    "step": lambda found: f"{1e3 * found['step_seconds']:,.0f} ms",
    "processor time": lambda found: f"{1e3 * found['step_processor_seconds']:,.0f} ms",
    "FLOP a step": lambda found: f"{found['flops'] / 1e12:,.3g} T",
    "utilisation": lambda found: f"{100 * found['utilisation']:.0f} %",
    "policy, 1": lambda found: f"{1e3 * found['policy_seconds']['1']:,.1f} ms",
    "policy, 16": lambda found: f"{1e3 * found['policy_seconds']['16']:,.1f} ms",
    "parameters and optimizer": lambda found: _gigabytes(
        found["memory"]["parameters"] + found["memory"]["optimizer"]
    ),
    "activations": lambda found: _gigabytes(found["memory"]["activations"]),
    "peak": lambda found: _gigabytes(found["memory"]["peak"]),
    "checkpoint": lambda found: f"{found['checkpoint']['seconds']:,.1f} s",
    "learner stands still": lambda found: (
        f"{100 * found['checkpoint']['still'] / found['checkpoint']['seconds']:.2f} %"
    ),
    "compiling": lambda found: f"{found['compile_seconds']:,.0f} s",
}
ASKED = 1
"""Columns that are known of a task that has failed, too."""


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def where(found: dict[str, Any]) -> str:
    """In words, what was measured on what."""
    return (
        f"{described(found)}; {found['kind']}, {found['dtype']}, batches of "
        f"{found['batch_size']} x {found['batch_length']} steps, fastest matrix product "
        f"{found['matmul_flops'] / 1e9:,.0f} GFLOP/s"
    )


def described(found: dict[str, Any]) -> str:
    """Device, driver and versions of a result."""
    there, versions = found["device"], found["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    cores = f", {there['cores']} cores" if there["platform"] == "cpu" else ""
    what = f"{there['platform']}{cores}, driver {there['driver']}"
    return (
        f"{there['count']} x {there['kind']} ({what}), {there['system']}, Python "
        f"{there['python']}, {names}"
    )


if __name__ == "__main__":
    try:
        with scratch() as place:
            result = measure(Task(**json.loads(sys.argv[1])), str(place))
    except (ConfigError, RuntimeError, MemoryError) as error:  # XLA raises the second
        result = {"problem": " ".join(str(error).split())[:300] or type(error).__name__}
    sys.stdout.write(json.dumps(result) + "\n")
