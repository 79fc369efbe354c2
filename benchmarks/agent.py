"""Dreamer's train step, policy call, memory, checkpoint and compile time, in each size.

The agent is made, compiled and called as the learner and the actor do it. Every size has a process
of its own with the environment variables of an agent: its memory is its own, and a size that does
not fit costs only its row. FLOP utilisation is what the model needs (`lowering`) against the
fastest matrix product of the same precision in the same process; on a CPU both are taken by CPU
time, which other programs disturb little.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Row, in_process, median_ms, scratch, timed
from dreamfleet.agents import DreamerConfig, ExecutionConfig, find_agent, size_preset
from dreamfleet.agents.dreamer.config import PUBLISHED_SIZES
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.errors import ConfigError, DreamfleetError
from dreamfleet.spaces import Space

POLICY_ROWS = (1, 8, 16)
_PRODUCTS = (1024, 2048, 4096, 8192)  # sides of matrices
_PACKAGES = ("dreamfleet", "jax", "jaxlib", "equinox", "optax", "numpy")


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    kind: str = "vector"
    size: str = "1m"
    dtype: str = "float32"
    batch_size: int = 16
    batch_length: int = 64
    report_length: int = 32
    seconds: float = 20.0
    """About how long train steps are measured; 0 to only compile."""
    calls: int = 500
    """Policy calls that are measured."""
    folder: str = ""
    """For compiled programs."""


def run(
    quick: bool = False, sizes: str = "1m", kind: str = "all", dtype: str = "float32"
) -> Iterator[Row]:
    """Measure sizes. A quick run uses tiny networks and batches."""
    task = Task(dtype=dtype)
    if quick:
        task = replace(task, batch_size=2, batch_length=4, report_length=4, seconds=0.1, calls=20)
    names = ("debug",) if quick and sizes == "1m" else sizes_of(sizes)
    described = False
    for size, each in itertools.product(names, ("vector", "image") if kind == "all" else (kind,)):
        found = _measured(replace(task, size=size, kind=each))
        if not described and "device" in found:
            described = True
            yield Row("devices", found["devices"], "", note=found["device"])
        yield from _rows(f"{each}, {size}", found)


def sizes_of(text: str) -> tuple[str, ...]:
    """Names between commas, or `all` published sizes.

    Raises:
        ConfigError: A size does not exist.
    """
    names = PUBLISHED_SIZES if text == "all" else tuple(text.split(","))
    for name in names:
        size_preset(name)
    return names


def _measured(task: Task) -> dict[str, Any]:
    """The figures of a task, with an empty and with a filled compilation cache; or a `problem`."""
    with scratch() as cache:
        task = replace(task, folder=str(cache))
        try:
            found = dict(in_process(__name__, asdict(task)))
            if "problem" not in found:
                found["warm"] = in_process(__name__, asdict(replace(task, seconds=0)))["compile"]
        except DreamfleetError as error:
            return {"problem": str(error)}
    return found


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[Row]:
    if "problem" in found:
        yield Row(f"{name}: train step", None, "ms", note=found["problem"])
        return
    share = f"{100 * found['utilisation']:.0f} % of the fastest matrix product"
    yield Row(f"{name}: train step", found["train"], "ms", note=found["settings"])
    yield Row(f"{name}: train step, CPU time", found["train_cpu"], "ms")
    note = f"{share}, {found['matmul'] / 1e9:,.0f} GFLOP/s"
    yield Row(f"{name}: FLOP of a train step", found["flops"] / 1e12, "TFLOP", note=note)
    for rows, milliseconds in zip(POLICY_ROWS, found["policy"], strict=True):
        yield Row(f"{name}: policy, batch {rows}", milliseconds, "ms")
    for rows, (middle, high) in zip(POLICY_ROWS, found["while_training"], strict=True):
        note = f"99th percentile {high:.1f} ms"
        yield Row(f"{name}: policy while training, batch {rows}", middle, "ms", note=note)
    memory = found["memory"]
    state = memory["parameters"] + memory["optimizer"]
    yield Row(f"{name}: parameters and optimizer", state / 1e9, "GB", note="on each device")
    yield Row(f"{name}: activations", memory["activations"] / 1e9, "GB", note="on each device")
    yield Row(f"{name}: peak memory", memory["peak"] / 1e9, "GB")
    seconds, still = found["checkpoint"]
    note = f"the learner waits for {100 * still / seconds:.2f} % of it"
    yield Row(f"{name}: checkpoint", seconds, "s", note=note)
    yield Row(f"{name}: compile", found["compile"], "s")
    yield Row(f"{name}: compile, warm cache", found["warm"], "s")


# --- in the process that measures ----------------------------------------------------------------


def measure(task: Task) -> dict[str, Any]:
    """All figures of one size: milliseconds, bytes and operations; compile time in seconds."""
    config = DreamerConfig(
        size_preset(task.size),
        execution=ExecutionConfig(cache_dir=task.folder, compute_dtype=task.dtype),  # type: ignore[arg-type]
    )
    obs, act = spaces(task.kind)
    agent: Any = find_agent("dreamer").make(obs, act, config, seed=0)
    start = time.perf_counter()
    agent.compile(
        batch_size=task.batch_size,
        batch_length=task.batch_length,
        report_length=task.report_length,
        policy_batches=POLICY_ROWS,
    )
    compiled = time.perf_counter() - start
    if not task.seconds:
        return {"compile": compiled}
    from benchmarks.lowering import train_step_flops

    step = learner_step(
        agent, random_batch(agent.example_batch(task.batch_size, task.batch_length))
    )
    step()
    (first,) = timed(step, 1)
    steps = int(min(10, max(2, task.seconds / first)))
    busy = time.process_time()
    milliseconds = median_ms(step, steps)
    cpu = (time.process_time() - busy) / steps
    device = this_device()
    cores = (os.cpu_count() or 1) if device["platform"] == "cpu" else 0
    flops = train_step_flops(config, obs, act, task.batch_size, task.batch_length)
    matmul = matmul_flops(task.dtype, cores)
    seconds = cpu / cores if cores else milliseconds / 1e3
    return {
        **device,
        "settings": f"{task.dtype}, batches of {task.batch_size} x {task.batch_length} steps",
        "compile": compiled,
        "train": milliseconds,
        "train_cpu": 1e3 * cpu,
        "policy": [median_ms(policy_caller(agent, obs, n), task.calls) for n in POLICY_ROWS],
        "while_training": _policy_while_training(agent, obs, step, task.calls),
        "checkpoint": _checkpoint(agent, step),
        "memory": {**agent.memory(), "peak": _peak_bytes()},
        "flops": flops,
        "matmul": matmul,
        "utilisation": flops / seconds / matmul,
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


def learner_step(agent: Any, batch: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
    """A train step as the learner makes it: results of the step before are read while it runs."""
    carry = agent.init_train(len(batch["is_first"]))
    batches = agent.stream(itertools.repeat(dict(batch)))
    previous: dict[str, Any] = {}

    def step() -> None:
        nonlocal carry, previous
        carry, outs, metrics = agent.train(carry, next(batches))
        for value in previous.values():
            np.asarray(value)
        previous = {**outs.get("replay", {}), **metrics}

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
    """A policy call for this many environments, again and again."""
    carry = agent.init_policy(rows)
    inputs = {name: np.zeros((rows, *s.shape), s.dtype) for name, s in obs.items()}

    def call() -> None:
        nonlocal carry
        carry, _, _ = agent.policy(carry, inputs)

    call()
    return call


def _policy_while_training(
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
    for rows in POLICY_ROWS:
        call, taken = policy_caller(agent, obs, rows), []
        for _ in range(calls):
            taken += timed(call, 1)
            stop.wait(0.002)
        result.append((1e3 * float(np.median(taken)), 1e3 * float(np.percentile(taken, 99))))
    stop.set()
    thread.join()
    return result


def _checkpoint(agent: Any, step: Callable[[], None]) -> tuple[float, float]:
    """Seconds to write a checkpoint while training continues, and for which the learner waits."""
    with scratch() as folder, ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        state = agent.save_later()
        still = time.perf_counter() - start

        def save() -> float:
            Checkpoint(folder).save({"agent": state()}, step=0)
            return time.perf_counter() - start

        writing = pool.submit(save)
        while not writing.done():
            step()
        return writing.result(), still


def matmul_flops(dtype: str, cores: int) -> float:
    """FLOP/s of the fastest square matrix product; by CPU time if a CPU with `cores` computes."""
    import jax
    import jax.numpy as jnp

    best = 0.0
    product = jax.jit(lambda a: a @ a)
    for side in _PRODUCTS:
        x = jnp.ones((side, side), dtype)
        call = partial(lambda x: product(x).block_until_ready(), x)
        call()
        busy = time.process_time()
        seconds = median_ms(call, 5) / 1e3
        if cores:
            seconds = (time.process_time() - busy) / 5 / cores
        best = max(best, 2.0 * side**3 / seconds)
        if seconds > 0.5:
            break
    return best


def this_device() -> dict[str, Any]:
    """Platform, number and description of the devices, with driver and versions."""
    import jax

    there = jax.devices()
    words = [f"{there[0].device_kind} ({there[0].platform})"]
    if there[0].platform == "cpu":
        words = [f"{_cpu_name()}, {os.cpu_count()} cores"]
    else:
        words.append(" ".join(str(there[0].client.platform_version).split()))
        nvidia = Path("/proc/driver/nvidia/version")
        if nvidia.is_file():
            words.append(nvidia.read_text().splitlines()[0].strip())
    words += [platform.platform(), f"Python {platform.python_version()}"]
    words += [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    device = ", ".join(words)
    return {"platform": there[0].platform, "devices": len(there), "device": device}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _peak_bytes() -> float:
    """Peak memory of the device, or of this process if the device does not count it."""
    import jax

    counted = jax.devices()[0].memory_stats() or {}
    own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(counted.get("peak_bytes_in_use") or own)


if __name__ == "__main__":
    asked = Task(**json.loads(sys.argv[1]))
    try:
        result = measure(asked)
    except (ConfigError, RuntimeError, MemoryError) as error:  # XLA raises the second
        result = {"problem": " ".join(str(error).split())[:300] or type(error).__name__}
    sys.stdout.write(json.dumps(result) + "\n")
