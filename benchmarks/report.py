"""What all benchmarks share: rows, the table and the file of them, timing, and processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dreamfleet.cli.console import say, write
from dreamfleet.errors import DreamfleetError
from dreamfleet.files import temporary_folder
from dreamfleet.fleet.tied import tied

_WARM_UP_SECONDS = 120.0
_spawn = multiprocessing.get_context("spawn")

scratch = partial(temporary_folder, "dreamfleet-bench-")
"""A folder that is removed at the end of the block."""


@dataclass(frozen=True)
class Row:
    """One measurement, with that of a peer if the peer ran in the same run.

    `ratio` is ours to the peer's, and above 1 is better; where less is better, it is the peer's
    value divided by ours.
    """

    name: str
    value: float | None
    """None if it could not be measured; the note says why."""
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    note: str = ""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        cells = self.name, _number(self.value), self.unit, ratio, _number(self.peer_value)
        return _line(*cells, ", ".join(filter(None, (self.peer, self.note))))


def _line(*cells: str) -> str:
    """One line of the table: name, value, unit, ratio, value of the peer, and the rest."""
    return "{:<46} {:>10} {:<10} {:>7} {:>10}  {}".format(*cells).rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def compare(
    name: str, value: float, unit: str, peer: str, peer_value: float, note: str = ""
) -> Row:
    """A row with its ratio. More per second is better; of everything else, less is."""
    ours, theirs = (value, peer_value) if unit.endswith("/s") else (peer_value, value)
    return Row(name, value, unit, peer, peer_value, ours / theirs if theirs else None, note)


def report(rows: Iterable[Row], path: Path | None) -> list[Row]:
    """Print each row when it is measured, and write all so far to a file."""
    found: list[Row] = []
    for row in rows:
        if not found:
            say(_line("name", "value", "unit", "ratio", "peer", "which peer, note"))
        found.append(row)
        say(str(row))
        if path:
            write(path, json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return found


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own options, and the settings of `dreamfleet train` behind `--`."""
    words = [*arguments, "--"]
    end = words.index("--")
    return words[:end], words[end + 1 : -1]


# --- time ----------------------------------------------------------------------------------------


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of several calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call."""
    return 1e3 * statistics.median(timed(call, repeats))


# --- processes -----------------------------------------------------------------------------------


def helper(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that calls a function, and ends when this one ends or is killed."""
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
    """Start processes, measure how fast a count rises after the warm-up, and end them. On a busy
    machine this takes longer than `seconds`: until the count has risen.

    Raises:
        DreamfleetError: The count did not reach the warm-up, or stands still after it.
    """
    for process in processes:
        process.start()
    try:
        _reach(count, warm_up)
        start, before = time.perf_counter(), count()
        time.sleep(seconds)
        _reach(count, before + 1)
        return (count() - before) / (time.perf_counter() - start)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _reach(count: Callable[[], int], goal: int) -> None:
    deadline = time.monotonic() + _WARM_UP_SECONDS
    while count() < goal:
        if time.monotonic() > deadline:
            raise DreamfleetError(f"Only {count()} of {goal} steps came in time.")
        time.sleep(0.01)


def program(
    module: str, *words: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a module as a program that ends with this process."""
    here = str(Path(__file__).parents[1])  # the benchmarks are not installed
    path = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        tied([module, *words]),
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **(env or {})},
        start_new_session=True,
        **options,
    )


def in_process(module: str, task: Any, *, agent: str = "dreamer", **variables: str) -> Any:
    """What a module prints as JSON for a task, run in a process with an agent's environment.

    Raises:
        DreamfleetError: The process has failed.
    """
    from dreamfleet.agents import find_agent  # processes of other benchmarks stay small

    kind = find_agent(agent)
    added = dict(kind.process_environment(kind.default(), os.environ))
    with program(
        module, json.dumps(task), env={**added, **variables}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        code = process.wait()
    if code < 0:
        raise DreamfleetError("its process was killed: there was probably too little memory")
    if code:
        raise DreamfleetError(f"its process ended with code {code}")
    return json.loads(lines[-1])
