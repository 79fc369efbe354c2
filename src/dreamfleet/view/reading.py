"""Read files of a run: never through a link, each byte once, thinned for a chart.

Names come from a browser, and every user with write access to a run chooses its directories. So
each part of a path is opened below the part before it, and none may be a link.
"""

from __future__ import annotations

import math
import os
import stat
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dreamfleet.metrics.outputs.jsonl import JsonlTail, decode_rows, last_lines
from dreamfleet.roles.logger import RECENT_EPISODES
from dreamfleet.statistics import Floats

MAX_READ_BYTES = 2 << 20
"""Per call."""
MAX_POINTS = 2048
"""Per metric."""
_MAX_METRICS, _MAX_NAME, _MAX_TEXT = 4000, 200, 500
_MIN_PAUSE_SECONDS, _PAUSE_FACTOR = 900.0, 20.0


@contextmanager
def open_inside(folder: Path, *names: str) -> Iterator[BinaryIO]:
    """Open a regular file below a folder for reading.

    Raises:
        OSError: The file is missing, not regular, or behind a link.
    """
    with _descend(folder, names, os.O_NONBLOCK) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{names[-1]} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file


def list_inside(folder: Path, *names: str) -> list[str]:
    """Sorted names in a directory below a folder, without links; empty if it cannot be read."""
    try:
        with _descend(folder, names, os.O_DIRECTORY) as directory, os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if not entry.is_symlink())
    except OSError:
        return []


def read_tail(folder: Path, *names: str, max_bytes: int) -> bytes:
    """The last lines of a file; empty if it cannot be read."""
    try:
        with open_inside(folder, *names) as file:
            return last_lines(file, max_bytes)
    except OSError:
        return b""


@contextmanager
def _descend(folder: Path, names: Sequence[str], kind: int) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for number, name in enumerate(names, 1):
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise FileNotFoundError(f"{name!r} is not a file name")
            own = (kind if number == len(names) else os.O_DIRECTORY) | os.O_NOFOLLOW
            inner = os.open(name, flags | own, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


class Column:
    """A growing metric as at most `MAX_POINTS` points, each joined from equally many rows."""

    def __init__(self) -> None:
        self._width = 1
        self._rest: list[tuple[float, float]] = []
        self._points = np.zeros((0, 4))
        self.rows = 0

    def extend(self, rows: list[tuple[float, float]]) -> None:
        """Add pairs of step and value."""
        self.rows += len(rows)
        self._rest += rows
        if whole := len(self._rest) // self._width * self._width:
            joined = _join(_points(self._rest[:whole]), np.arange(0, whole, self._width))
            del self._rest[:whole]
            self._points = np.concatenate([self._points, joined])
        while len(self._points) >= MAX_POINTS:
            even = len(self._points) // 2 * 2
            joined = _join(self._points[:even], np.arange(0, even, 2))
            self._points = np.concatenate([joined, self._points[even:]])
            self._width *= 2

    @property
    def points(self) -> Floats:
        """Step, mean, minimum and maximum of each point."""
        if not self._rest:
            return self._points
        return np.concatenate([self._points, _join(_points(self._rest), np.zeros(1, int))])


def _points(rows: list[tuple[float, float]]) -> Floats:
    return np.array(rows)[:, [0, 1, 1, 1]]


def _join(points: Floats, starts: NDArray[np.intp]) -> Floats:
    """Join the points from each start to the next into one."""
    ends = np.append(starts[1:], len(points))
    step, mean, low, high = points.T
    mean = np.add.reduceat(mean, starts) / (ends - starts)
    edges = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    return np.stack([step[ends - 1], mean, *edges], 1)


def thinned(points: Floats, count: int) -> Floats:
    """At most `count` points."""
    if len(points) <= count:
        return points
    return _join(points, np.linspace(0, len(points), count, endpoint=False).astype(int))


class MetricsFile:
    """A growing file of JSON rows with a `step`: each number becomes a column. Each row is read
    once. Rows without a number under each key of `needed` are left out."""

    def __init__(self, folder: Path, name: str, *needed: str) -> None:
        self._needed = ("step", *needed)
        self._tail = JsonlTail(folder / name, opener=partial(open_inside, folder, name))
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._names: set[str] = set()
        self.step = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        """Values of the last key of `needed`."""
        self.columns: dict[str, Column] = {}
        self.texts: dict[str, str] = {}
        self.newest: dict[str, float | None] = {}
        """None if the value is not finite."""

    @property
    def behind(self) -> bool:
        """Whether there is more to read."""
        return self._tail.behind

    def read(self) -> None:
        """Read what is new, at most `MAX_READ_BYTES`."""
        block = self._tail.block(MAX_READ_BYTES)
        if self._tail.replaced:
            self._clear()
        added: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        names, newest = self._names, self.newest  # a row takes microseconds, and there are many
        for row in decode_rows(block):
            if any(finite(row.get(name)) is None for name in self._needed):
                continue
            self.rows += 1
            step = self.step = float(row["step"])
            self.recent.append(float(row[self._needed[-1]]))
            for name, value in row.items():
                if name not in names and not self._keeps(name):
                    continue
                if isinstance(value, str):
                    self.texts[name] = value[:_MAX_TEXT]
                elif value is None or isinstance(value, (int, float)):
                    number = newest[name] = finite(value)
                    if number is not None:
                        added[name].append((step, number))
        for name, pairs in added.items():
            self.columns.setdefault(name, Column()).extend(pairs)

    def _keeps(self, name: str) -> bool:
        """Bound new names, so that a run cannot fill the memory."""
        if name == "step" or len(name) > _MAX_NAME or len(self._names) >= _MAX_METRICS:
            return False
        self._names.add(name)
        return True

    @property
    def hours(self) -> Floats | None:
        """Steps and training hours, in two columns; None unless every row has a time."""
        times = self.columns.get("time")
        if times is None or times.rows != self.rows:
            return None
        points = times.points
        return np.stack([points[:, 0], training_hours(points[:, 3], points[:, 0])], 1)


def training_hours(time: Floats, step: Floats) -> Floats:
    """Hours since the first of these Unix times, without pauses between a stop and a resume.

    A pause lasts a quarter of an hour at least, and 20 times longer than the run usually takes for
    as many steps.
    """
    if len(time) < 2:
        return np.zeros(len(time))
    seconds, steps = (np.clip(np.diff(each), 0, None) for each in (time, step))
    pace = seconds / np.maximum(steps, 1)
    order = np.argsort(pace)
    half = np.searchsorted(np.cumsum(steps[order]), steps.sum() / 2)  # the median over steps
    typical = pace[order][min(int(half), len(order) - 1)]
    seconds[seconds > np.maximum(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * typical * steps)] = 0.0
    return np.concatenate([[0.0], np.cumsum(seconds)]) / 3600


def finite(value: Any) -> float | None:
    """A finite number; None for everything else."""
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None
