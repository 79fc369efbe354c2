"""Where the time goes, and what a process uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil


class _Total:
    __slots__ = ("count", "longest", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.longest = 0.0


class _Section:
    """One run of a section: an object for each, so that sections nest and threads share a timer."""

    __slots__ = ("_name", "_start", "_timer")

    def __init__(self, timer: Timer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._start = self._timer.clock()

    def __exit__(self, *error: object) -> None:
        self._timer.add(self._name, self._timer.clock() - self._start)


class Timer:
    """Named sections of code:

        with timer.section("policy"):
            ...

    For each name `stats` returns how often it ran (`count`), the seconds it took in total
    (`total`), on average (`avg`) and at most (`max`), and its share of the time since the last call
    of `stats` (`frac`; above 1 when several threads are in it at once). Any thread may use it. One
    section costs about a microsecond.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._totals: dict[str, _Total] = {}
        self._since = clock()

    def section(self, name: str) -> _Section:
        """A context manager that times its block."""
        return _Section(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Count a duration that was measured elsewhere."""
        with self._lock:
            total = self._totals.get(name)
            if total is None:
                total = self._totals[name] = _Total()
            total.count += 1
            total.seconds += seconds
            if seconds > total.longest:
                total.longest = seconds

    def stats(self) -> dict[str, float]:
        """`NAME/count`, `NAME/total`, `NAME/avg`, `NAME/max` and `NAME/frac` of every section."""
        now = self.clock()
        with self._lock:
            totals, elapsed = self._totals, now - self._since
            self._totals, self._since = {}, now
        result = {}
        for name, total in totals.items():
            result[f"{name}/count"] = float(total.count)
            result[f"{name}/total"] = total.seconds
            result[f"{name}/avg"] = total.seconds / total.count
            result[f"{name}/max"] = total.longest
            result[f"{name}/frac"] = total.seconds / elapsed if elapsed > 0 else 0.0
        return result


class Usage:
    """What this process uses.

    `cpu` is in cores since the last call: 2 for a process that keeps two cores busy. `memory` is
    in bytes.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def stats(self) -> dict[str, float]:
        """`cpu`, `memory`, `threads` and `files` (open ones)."""
        with self._process.oneshot():
            memory = self._process.memory_info()
            return {
                "cpu": self._process.cpu_percent() / 100,
                "memory": float(memory.rss),
                "threads": float(self._process.num_threads()),
                "files": float(self._process.num_fds()),
            }
