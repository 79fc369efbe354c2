"""Where the time goes, and what a process uses."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil


class Timer:
    """Named sections of code:

        with timer.section("policy"):
            ...

    For each name `stats` returns how often it ran (`count`), the seconds it took in total
    (`total`), on average (`avg`) and at most (`max`), and its share of the time since the last call
    of `stats` (`frac`; above 1 when several threads are in it at once). Any thread may use it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, float, float]] = {}  # count, seconds, longest
        self._since = clock()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the block; sections nest."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            with self._lock:
                count, total, longest = self._totals.get(name, (0, 0.0, 0.0))
                self._totals[name] = count + 1, total + seconds, max(longest, seconds)

    def stats(self) -> dict[str, float]:
        """`NAME/count`, `NAME/total`, `NAME/avg`, `NAME/max` and `NAME/frac` of every section."""
        now = self._clock()
        with self._lock:
            totals, elapsed = self._totals, now - self._since
            self._totals, self._since = {}, now
        result = {}
        for name, (count, total, longest) in totals.items():
            frac = total / elapsed if elapsed > 0 else 0.0
            stats = {"count": float(count), "total": total, "avg": total / count}
            stats |= {"max": longest, "frac": frac}
            result.update({f"{name}/{key}": value for key, value in stats.items()})
        return result


class Rate:
    """How fast a count has risen over the last seconds; one that falls starts from nothing."""

    def __init__(self, seconds: float) -> None:
        self._window = seconds
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, count: float) -> None:
        """Take the count at a time."""
        if self._samples and count < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, count))
        while now - self._samples[0][0] > self._window:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        """For how long it is known."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    @property
    def value(self) -> float:
        """Counts per second."""
        if not self.seconds:
            return 0.0
        return (self._samples[-1][1] - self._samples[0][1]) / self.seconds


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
