"""Several devices against one: the same numbers, what each needs, and what splitting costs.

Each number of devices has a process of its own, which trains from the same parameters on the same
batches: data parallel, fully sharded, and both (groups of devices that share a copy each). On a
processor the devices are virtual ones that share its cores.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.agents import (
    DreamerConfig,
    ExecutionConfig,
    OptimizerConfig,
    find_agent,
    size_preset,
)
from dreamfleet.benchmarks.agent import random_batch, spaces
from dreamfleet.benchmarks.agent_sizes import described, this_device
from dreamfleet.benchmarks.report import in_process, scratch
from dreamfleet.errors import ConfigError, DreamfleetError

MODES = ("data parallel", "fully sharded", "both")
UPDATES = 20
LOSSES, PARAMETERS = 1e-3, 1e-2
"""How far several devices may be from one after all updates: of every loss, as a share of it or of
one, and of all parameters together, as a share of the way that they have gone. Sums in another
order round differently, and a rounding may tip a sample over, after which two runs rightly
differ."""
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


@dataclass(frozen=True)
class Task:
    """What one process does."""

    devices: int
    mode: str
    size: str = "1m"
    batch_size: int = 16
    batch_length: int = 64
    updates: int = UPDATES
    folder: str = ""
    """Where its parameters are written to."""
    quick: bool = False
    """Compile with less effort; then times mean nothing."""


def counts_of(text: str) -> tuple[int, ...]:
    """The numbers between commas; one device is what the others are compared with.

    Raises:
        ConfigError: They are no numbers.
    """
    try:
        counts = {int(word) for word in text.split(",")}
    except ValueError:
        raise ConfigError(f"--devices {text}: write numbers such as 1,2,4,8.") from None
    if min(counts) < 1:
        raise ConfigError(f"--devices {text}: there is at least one device.")
    return tuple(sorted({1, *counts}))


def run(counts: Sequence[int], like: Task) -> Iterator[dict[str, Any]]:
    """What each number of devices gives, in each mode; the first one is a single device."""
    one: dict[str, Any] = {}
    for count in counts:
        for mode in MODES[: 1 if count == 1 else 2 if count < 4 else 3]:
            with scratch() as folder:
                task = replace(like, devices=count, mode=mode, folder=str(folder))
                found = {**asdict(task), **_found(task)}
                if "problem" not in found:
                    found["parameters"] = dict(np.load(folder / "parameters.npz"))
            if not one:
                one = found
            yield _compared(found, one)


def _found(task: Task) -> dict[str, Any]:
    variables = {"JAX_NUM_CPU_DEVICES": str(task.devices)}
    if task.quick:
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    try:
        return dict(in_process(__name__, asdict(task), **variables))
    except DreamfleetError as error:
        return {"problem": str(error)}


def _compared(found: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The result with what it differs in from that of one device."""
    if "problem" in found or "problem" in one:
        return {key: value for key, value in found.items() if key != "parameters"}
    losses, theirs = np.asarray(one["losses"]), np.asarray(found["losses"])
    apart = float(np.max(np.abs(losses - theirs) / np.maximum(np.abs(losses), 1.0)))
    off_the_way = _distance(one["parameters"], found["parameters"]) / max(one["way"], 1e-12)
    result = {key: value for key, value in found.items() if key not in ("parameters", "losses")}
    return {
        **result,
        "losses_apart": apart,
        "parameters_apart": off_the_way,
        "same": apart <= LOSSES and off_the_way <= PARAMETERS,
        "times_one": found["step_seconds"] / one["step_seconds"],
    }


def _distance(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Between all parameters of two agents."""
    return math.sqrt(sum(float(np.sum(np.square(some[name] - others[name]))) for name in some))


def _parameters(agent: Any) -> dict[str, Any]:
    return {name: value for name, value in agent.save().items() if name.startswith("nets/")}


def measure(task: Task) -> dict[str, Any]:
    """Losses of all updates, the time of one, and what a device needs."""
    import jax

    from dreamfleet.agents.dreamer.imagination import IMAGINATION

    there = jax.devices()
    if len(there) < task.devices:
        return {"problem": f"{len(there)} devices are here"}
    obs, act = spaces("vector")
    sharded = task.mode != "data parallel"
    execution = ExecutionConfig(
        cache_dir="",
        shard_parameters=sharded,
        shard_over=task.devices // 2 if task.mode == "both" else 0,
        train_devices=tuple(range(task.devices)),
    )
    # A warm-up as short as this moves the parameters as far as many updates with the usual one.
    optimizer = OptimizerConfig(warmup=2)
    config = DreamerConfig(size_preset(task.size), optimizer=optimizer, execution=execution)
    agent: Any = find_agent("dreamer").make(obs, act, config, seed=0)
    agent.compile(batch_size=task.batch_size, batch_length=task.batch_length)
    carry = agent.init_train(task.batch_size)
    example = agent.example_batch(task.batch_size, task.batch_length)
    losses, times, first = [], [], _parameters(agent)
    for number in range(task.updates):
        batch = random_batch(example, seed=number)
        start = time.perf_counter()
        carry, _, metrics = agent.train(carry, batch)
        losses.append([float(value) for name, value in sorted(metrics.items()) if "loss/" in name])
        times.append(time.perf_counter() - start)
    nets = _parameters(agent)
    np.savez(Path(task.folder) / "parameters.npz", **nets)
    inside = collectives_in_loops(agent._train_program.newest.as_text())
    return {
        **this_device(),
        "losses": losses,
        "way": _distance(first, nets),
        "step_seconds": float(np.median(times[2:])),
        "memory": agent.memory(),
        "collectives_in_imagination": sum(n for name, n in inside.items() if IMAGINATION in name),
        "collectives_in_loops": sum(inside.values()),
    }


def collectives_in_loops(text: str) -> dict[str, int]:
    """How many collective operations a compiled program has in each of its loops, by what the loop
    is called; in loops inside of them, too."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for each in text.splitlines():
        if each.endswith("{") and (found := re.match(r"(?:ENTRY )?%?([\w.-]+) ", each)):
            lines = bodies[found[1]] = []
        lines.append(each)

    def inside(name: str, seen: set[str]) -> int:
        if name in seen or name not in bodies:
            return 0
        seen.add(name)
        count = 0
        for line in bodies[name]:
            count += bool(_COLLECTIVE.search(line))
            called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", line)
            for names in re.findall(r"(?:branch_computations|calls)=\{([^}]*)\}", line):
                called += [name.strip().lstrip("%") for name in names.split(",")]
            count += sum(inside(other, seen) for other in called)
        return count

    result: dict[str, int] = {}
    for lines in bodies.values():
        for line in lines:
            loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
            if loop:
                name = re.search(r'op_name="([^"]*)"', line)
                key = f"{name[1] if name else ''} {loop[1]}"
                result[key] = inside(loop[1], set())
    return result


# --- as a table ----------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "devices": lambda found: str(found["devices"]),
    "how": lambda found: found["mode"],
    "step": lambda found: f"{1e3 * found['step_seconds']:,.0f} ms",
    "times one device": lambda found: f"{found['times_one']:.2f}",
    "losses apart": lambda found: f"{found['losses_apart']:.1e}",
    "parameters apart": lambda found: f"{found['parameters_apart']:.1e}",
    "the same": lambda found: "yes" if found["same"] else "no",
    "state on each": lambda found: (
        f"{(found['memory']['parameters'] + found['memory']['optimizer']) / 1e6:,.1f} MB"
    ),
    "step on each": lambda found: f"{found['memory']['step'] / 1e6:,.0f} MB",
    "collectives in the imagination": lambda found: str(found["collectives_in_imagination"]),
    "in all loops": lambda found: str(found["collectives_in_loops"]),
}
ASKED = 2
"""Columns that are known of a task that has failed, too."""


def where(found: dict[str, Any]) -> str:
    """In words, what was measured on what."""
    return (
        f"{described(found)}; size {found['size']}, float32, batches of {found['batch_size']} x "
        f"{found['batch_length']} steps, {found['updates']} updates"
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Task(**json.loads(sys.argv[1])))) + "\n")
