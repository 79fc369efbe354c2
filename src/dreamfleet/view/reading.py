"""Read files of a run: never through a link, each byte once, thinned for a chart.

Names come from a browser, and every user with write access to a run chooses its directories. So
each part of a path is opened below the part before it, and none may be a link.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
T = TypeVar("T")

MAX_READ_BYTES = 2 << 20
"""Per call."""
MAX_POINTS = 2048
"""Per metric."""
_MAX_METRICS = 4000
_MAX_NAME = 200
_MAX_TEXT = 500
_DAMAGED = (msgspec.MsgspecError, ValueError, RecursionError)
_ROWS = msgspec.json.Decoder(dict[str, Any])


@contextmanager
def open_inside(folder: Path, *names: str) -> Iterator[BinaryIO]:
    """Open a regular file below a folder for reading.

    Raises:
        OSError: The file is missing, not regular, or behind a link.
    """
    *folders, name = names
    with _open_folder(folder, folders) as directory:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(_checked_name(name), flags, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{name} is not a regular file")
        yield file


def list_inside(folder: Path, *names: str) -> list[str]:
    """Sorted names in a directory below a folder, without links; empty if it cannot be read."""
    try:
        with _open_folder(folder, names) as directory, os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if not entry.is_symlink())
    except OSError:
        return []


def read_tail(folder: Path, *names: str, max_bytes: int) -> tuple[bytes, int]:
    """The last complete lines of a file, and its size; empty if it cannot be read."""
    try:
        with open_inside(folder, *names) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            block = file.read(max_bytes)
    except OSError:
        return b"", 0
    return (block if size <= max_bytes else block.partition(b"\n")[2]), size


@contextmanager
def _open_folder(folder: Path, names: Sequence[str]) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        for name in names:
            inner = os.open(_checked_name(name), flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _checked_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileNotFoundError(f"{name!r} is not a file name")
    return name


class Tail:
    """Complete lines of a growing file; each is returned once."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._folder, self._names = folder, names
        self._inode = 0
        self._skip_line = False
        self._offset = 0
        self.behind = False
        """Whether the file holds more than one call reads."""
        self.replaced = 0
        """How often the file was replaced or truncated, and read from its start again."""

    def read(self) -> bytes:
        """The next lines with their newlines; empty if there are none."""
        try:
            with open_inside(self._folder, *self._names) as file:
                found = os.fstat(file.fileno())
                if self._inode and (found.st_ino != self._inode or found.st_size < self._offset):
                    self._offset, self._skip_line = 0, False
                    self.replaced += 1
                self._inode = found.st_ino
                file.seek(self._offset)
                block = file.read(MAX_READ_BYTES) if found.st_size > self._offset else b""
        except OSError:
            return b""
        self.behind = len(block) == MAX_READ_BYTES
        end = block.rfind(b"\n") + 1
        if not end:
            if self.behind:  # longer than any line of a run: skip it
                self._offset, self._skip_line = self._offset + len(block), True
            return b""
        self._offset += end
        start = block.find(b"\n") + 1 if self._skip_line else 0
        self._skip_line = False
        return block[start:end]


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
        whole = len(self._rest) // self._width * self._width
        if whole:
            joined = _join(_columns(self._rest[:whole]), self._width)
            del self._rest[:whole]
            self._points = np.concatenate([self._points, joined])
        while len(self._points) >= MAX_POINTS:
            even = len(self._points) // 2 * 2
            joined = _join(self._points[:even], 2)
            self._points = np.concatenate([joined, self._points[even:]])
            self._width *= 2

    @property
    def points(self) -> Floats:
        """Step, mean, minimum and maximum of each point."""
        if not self._rest:
            return self._points
        return np.concatenate([self._points, _join(_columns(self._rest), len(self._rest))])


def _columns(rows: list[tuple[float, float]]) -> Floats:
    found = np.array(rows)
    return np.column_stack([found, found[:, 1], found[:, 1]])


def _join(points: Floats, width: int) -> Floats:
    """Join each `width` consecutive points into one."""
    groups = points.reshape(-1, width, 4)
    return np.stack(
        [groups[:, -1, 0], groups[..., 1].mean(1), groups[..., 2].min(1), groups[..., 3].max(1)], 1
    )


class MetricsFile:
    """A growing file of JSON rows with a `step`: each number becomes a column. Rows without a
    number under each key of `needed` are left out."""

    def __init__(
        self, folder: Path, name: str = "metrics.jsonl", needed: Sequence[str] = ("step",)
    ) -> None:
        self._tail, self._needed = Tail(folder, name), needed
        self._replaced = 0
        self._clear()

    def _clear(self) -> None:
        self._names: set[str] = set()
        self.columns: dict[str, Column] = {}
        self.texts: dict[str, str] = {}
        self.newest: dict[str, float | None] = {}
        """None if the value is not finite."""
        self.rows = 0

    @property
    def behind(self) -> bool:
        """Whether there is more to read."""
        return self._tail.behind

    def read(self) -> None:
        """Read what is new, at most `MAX_READ_BYTES`."""
        rows = decode_lines(_ROWS, self._tail.read())
        if self._tail.replaced != self._replaced:
            self._replaced = self._tail.replaced
            self._clear()
        added: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if any(finite(row.get(name)) is None for name in self._needed):
                continue
            self.rows += 1
            step = float(row["step"])
            for name, value in row.items():
                if not self._keeps(name):
                    continue
                if isinstance(value, str):
                    self.texts[name] = value[:_MAX_TEXT]
                elif value is None or isinstance(value, (int, float)):
                    number = self.newest[name] = finite(value)
                    if number is not None:
                        added.setdefault(name, []).append((step, number))
        for name, pairs in added.items():
            self.columns.setdefault(name, Column()).extend(pairs)

    def _keeps(self, name: str) -> bool:
        """Bound names, so that a run cannot fill the memory with new ones."""
        if name in self._names:
            return True
        if name == "step" or len(name) > _MAX_NAME or len(self._names) >= _MAX_METRICS:
            return False
        self._names.add(name)
        return True


class ScoresFile(MetricsFile):
    """`scores.jsonl`: the score of each training episode, and when it ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "scores.jsonl", ("step", "episode/score"))

    @property
    def hours(self) -> Floats | None:
        """Steps and training hours, in two columns; None unless every episode has a time."""
        times = self.columns.get("time")
        if times is None or times.rows != self.rows:
            return None
        points = times.points
        return np.stack([points[:, 0], training_hours(points[:, 3], points[:, 0])], 1)


_MIN_PAUSE_SECONDS = 900.0
_PAUSE_FACTOR = 20.0


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
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def decode_lines(decoder: msgspec.json.Decoder[T], block: bytes) -> list[T]:
    """The rows of a block, without damaged lines."""
    with suppress(*_DAMAGED):
        return decoder.decode_lines(block)
    rows = []
    for line in block.splitlines():
        with suppress(*_DAMAGED):
            rows.append(decoder.decode(line))
    return rows


def thinned(points: Floats, count: int) -> Floats:
    """At most `count` rows: means of equally many consecutive ones."""
    if len(points) <= count:
        return points
    edges = np.linspace(0, len(points), count + 1).astype(int)
    return np.add.reduceat(points, edges[:-1], axis=0) / np.diff(edges)[:, None]
