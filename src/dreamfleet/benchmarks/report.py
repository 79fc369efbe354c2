"""What all benchmarks share: the row that each reports, and how time is taken."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from dreamfleet.errors import DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.tied import tied

_WARM_UP_SECONDS = 120.0
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Row:
    """One measurement, with that of a peer where there is one.

    `ratio` is ours to the peer's and above 1 is better, also where smaller values are better
    (then it is the peer's value divided by ours).
    """

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    note: str = ""


def compare(
    name: str,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    note: str = "",
) -> Row:
    """A row with the ratio worked out: more a second is better, and less of everything else."""
    ratio = value / peer_value if unit.endswith("/s") else peer_value / value
    return Row(name, value, unit, peer, peer_value, ratio, note)


scratch = partial(temporary_folder, "dreamfleet-bench-")
"""A folder that is removed at the end of the block."""


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of several calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """How often something can be called, after it was a few times."""
    for _ in range(20):
        call()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            call()
        count += 10
    return count / elapsed


def helper(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that calls a function, and ends with this one, also if this one is killed."""
    return _spawn.Process(target=_helped, args=(target, *args), daemon=True)


def _helped(target: Callable[..., None], *args: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    target(*args)


def rate_of(
    count: Callable[[], int], processes: Sequence[BaseProcess], warm_up: int, seconds: float
) -> float:
    """How fast something is counted that processes do, once it has come to the warm-up. They are
    started here, and ended.

    Raises:
        DreamfleetError: It does not come to that.
    """
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + _WARM_UP_SECONDS
        while count() < warm_up:
            if time.monotonic() > deadline:
                raise DreamfleetError(f"Only {count()} of {warm_up} warm-up steps came in time.")
            time.sleep(0.01)
        start, before = time.perf_counter(), count()
        time.sleep(seconds)
        return (count() - before) / (time.perf_counter() - start)
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_process(module: str, task: Any, *, agent: str = "dreamer", **variables: str) -> Any:
    """What a module prints as JSON when it is given a task, run in a process as that of an agent.

    Raises:
        DreamfleetError: The process has failed.
    """
    from dreamfleet.agents import find_agent  # processes of other benchmarks stay small

    kind = find_agent(agent)
    added = kind.process_environment(kind.default(), os.environ)
    with subprocess.Popen(
        tied([module, json.dumps(task)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **added, **variables},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        code = process.wait()
    if code < 0:
        raise DreamfleetError("its process was killed: there was probably too little memory")
    if code:
        raise DreamfleetError(f"its process ended with code {code}")
    return json.loads(lines[-1])


def markdown(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
