"""Files of a run, and those that grow read once and thinned.

Names come from a browser, and directories from anybody who may write a run. So every part of a path
is opened by itself, below the one before, and none of them may be a link.

A page shows a thousand points at most, so no more than a few thousand are kept of any metric,
however long the run is: rows that lie next to each other are joined, with their mean, lowest and
highest. Every byte of a file is read once, and no call reads more than a few megabytes.
"""

from __future__ import annotations

import math
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray


@contextmanager
def open_inside(folder: Path, *names: str) -> Iterator[BinaryIO]:
    """A regular file below a folder, open for reading. The folder is the one that is
    meant, and each part of what follows is a name.

    Raises:
        OSError: There is no such file, it is no regular file, or a link leads to it.
    """
    *folders, name = names
    with _below(folder, folders) as directory:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(_plain(name), flags, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{name} is no regular file")
        yield file


def list_inside(folder: Path, *names: str) -> list[os.DirEntry[str]]:
    """What a directory below a folder holds, in order; nothing if there is no such directory, or if
    it is a link."""
    try:
        with _below(folder, names) as directory, os.scandir(directory) as entries:
            return sorted(
                (entry for entry in entries if not entry.is_symlink()), key=lambda e: e.name
            )
    except OSError:
        return []


@contextmanager
def _below(folder: Path, names: tuple[str, ...] | list[str]) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        for name in names:
            following = os.open(_plain(name), flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = following
        yield descriptor
    finally:
        os.close(descriptor)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileNotFoundError(f"{name!r} is no name of a file")
    return name


Floats = NDArray[np.float64]

MOST_BYTES = 2 << 20
"""That one call reads."""
MOST_POINTS = 4096
"""That are kept of a metric."""
_MOST_KEYS = 4000
_LONGEST_KEY = 200
_LONGEST_TEXT = 500


class Tail:
    """Complete lines of a file that grows; each is read once."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._folder, self._names = folder, names
        self._inode = 0
        self._torn = False
        self.offset = 0
        """Bytes that were read."""
        self.size = 0
        """Bytes that there were at the last look."""
        self.behind = False
        """Whether there was more to read than one call reads."""
        self.replaced = 0
        """How often the file was another one, or had become shorter, and was read from its start
        again."""

    def read(self) -> bytes:
        """The next lines, each with its newline; empty if there are none."""
        try:
            with open_inside(self._folder, *self._names) as file:
                stat = os.fstat(file.fileno())
                if self._inode and (stat.st_ino != self._inode or stat.st_size < self.offset):
                    self.offset, self._torn = 0, False
                    self.replaced += 1
                self._inode, self.size = stat.st_ino, stat.st_size
                self.behind = False
                if stat.st_size == self.offset:
                    return b""
                file.seek(self.offset)
                block = file.read(MOST_BYTES)
                self.behind = len(block) == MOST_BYTES
        except OSError:
            return b""
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) == MOST_BYTES:  # no line of a run is that long
                self.offset, self._torn = self.offset + len(block), True
            return b""
        self.offset += end
        start = block.find(b"\n") + 1 if self._torn else 0
        self._torn = False
        return block[start:end]


class _File(ABC):
    """A file of JSON lines that grows; each row is taken in once."""

    def __init__(self, folder: Path, name: str, row: Any) -> None:
        self._tail = Tail(folder, name)
        self._decoder = msgspec.json.Decoder(row)
        self._seen = 0
        self._clear()

    @abstractmethod
    def _clear(self) -> None:
        """Forget all rows: the file is another one."""

    @abstractmethod
    def _take(self, rows: list[Any]) -> None:
        """Take in the next rows."""

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def read(self) -> None:
        """Read what is new, up to a few megabytes."""
        block = self._tail.read()
        if self._tail.replaced != self._seen:
            self._seen = self._tail.replaced
            self._clear()
        self._take(decode_lines(self._decoder, block))


class _ScoreRow(msgspec.Struct):
    step: float
    score: float | None = msgspec.field(name="episode/score", default=None)
    time: float | None = None


class ScoreFile(_File):
    """`scores.jsonl`: when each training episode ended, and what it scored."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "scores.jsonl", _ScoreRow)

    def _clear(self) -> None:
        self._columns = [array("d"), array("d"), array("d")]

    def __len__(self) -> int:
        return len(self._columns[0])

    def _take(self, rows: list[_ScoreRow]) -> None:
        for row in rows:
            if row.score is not None and math.isfinite(row.score + row.step):
                self._columns[0].append(row.step)
                self._columns[1].append(row.score)
                self._columns[2].append(math.nan if row.time is None else row.time)

    @property
    def step(self) -> Floats:
        return np.array(self._columns[0])

    @property
    def score(self) -> Floats:
        return np.array(self._columns[1])

    @property
    def hours(self) -> Floats | None:
        """Training time at the end of each episode, from that of the first one on; None if not
        every episode says when it ended."""
        time = np.array(self._columns[2])
        return training_hours(time, self.step) if np.isfinite(time).all() else None


_LONGEST_PAUSE = 900.0
_PAUSE_FACTOR = 20.0


def training_hours(time: Floats, step: Floats) -> Floats:
    """Hours since the first of these Unix times, without pauses: a run that was resumed a week
    later has not trained for a week. A pause is a quarter of an hour at least, and many times
    longer than the run takes for as many steps."""
    if len(time) < 2:
        return np.zeros(len(time))
    seconds, steps = (np.clip(np.diff(each), 0, None) for each in (time, step))
    pace = seconds / np.maximum(steps, 1)
    order = np.argsort(pace)
    half = np.searchsorted(np.cumsum(steps[order]), steps.sum() / 2)  # the median over steps
    typical = pace[order][min(int(half), len(order) - 1)]
    seconds[seconds > np.maximum(_LONGEST_PAUSE, _PAUSE_FACTOR * typical * steps)] = 0.0
    return np.concatenate([[0.0], np.cumsum(seconds)]) / 3600


class Thinned:
    """A column that grows, as points that stand for equally many rows each."""

    def __init__(self) -> None:
        self._width = 1
        self._raw: list[tuple[float, float]] = []
        self._points = np.zeros((0, 4))
        self.rows = 0

    def extend(self, rows: list[tuple[float, float]]) -> None:
        """Add rows of a step and a value."""
        self.rows += len(rows)
        self._raw += rows
        whole = len(self._raw) // self._width * self._width
        if whole:
            new = np.array(self._raw[:whole]).reshape(-1, self._width, 2)
            del self._raw[:whole]
            at, value = new[..., 0], new[..., 1]
            joined = np.stack([at[:, -1], value.mean(1), value.min(1), value.max(1)], 1)
            self._points = np.concatenate([self._points, joined])
        while len(self._points) >= MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        even = len(self._points) // 2 * 2
        pairs, rest = self._points[:even].reshape(-1, 2, 4), self._points[even:]
        joined = np.stack(
            [pairs[:, 1, 0], pairs[..., 1].mean(1), pairs[..., 2].min(1), pairs[..., 3].max(1)], 1
        )
        self._points = np.concatenate([joined, rest])
        self._width *= 2

    @property
    def points(self) -> Floats:
        """Step, mean, lowest and highest of each point; the last rows are points of their own."""
        if not self._raw:
            return self._points
        rest = np.array(self._raw)
        last = [rest[-1, 0], rest[:, 1].mean(), rest[:, 1].min(), rest[:, 1].max()]
        return np.concatenate([self._points, [last]])


class MetricsFile(_File):
    """`metrics.jsonl`: every metric as a thinned column, and the newest text of those that are
    words."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "metrics.jsonl", dict[str, Any])

    def _clear(self) -> None:
        self._keys: set[str] = set()
        self.columns: dict[str, Thinned] = {}
        self.texts: dict[str, str] = {}
        self.newest: dict[str, float | None] = {}
        """The newest value of every number; None if it was not finite."""
        self.rows = 0

    @property
    def share(self) -> float:
        """How much of the file was read, from 0 to 1."""
        return self._tail.offset / self._tail.size if self._tail.size else 1.0

    def _take(self, rows: list[dict[str, Any]]) -> None:
        new: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            step = finite(row.get("step"))
            if step is None:
                continue
            self.rows += 1
            for key, value in row.items():
                if not self._has_room(key):
                    continue
                if isinstance(value, (int, float)):
                    number = self.newest[key] = finite(value)
                    if number is not None:
                        new.setdefault(key, []).append((step, number))
                elif value is None:
                    self.newest[key] = None
                elif isinstance(value, str):
                    self.texts[key] = value[:_LONGEST_TEXT]
        for key, points in new.items():
            self.columns.setdefault(key, Thinned()).extend(points)

    def _has_room(self, key: str) -> bool:
        """Whether a metric is kept: a run that makes up names must not fill the memory."""
        if key in self._keys:
            return True
        if key == "step" or len(key) > _LONGEST_KEY or len(self._keys) >= _MOST_KEYS:
            return False
        self._keys.add(key)
        return True


def finite(value: Any) -> float | None:
    """A number that can be drawn; None for everything else."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def decode_lines(decoder: Any, block: bytes) -> list[Any]:
    """The rows of a block; lines that are damaged are left out."""
    if not block:
        return []
    try:
        rows: list[Any] = decoder.decode_lines(block)
        return rows
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    rows = []
    for line in block.splitlines():
        try:
            rows.append(decoder.decode(line))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return rows


def thinned(points: Floats, most: int) -> Floats:
    """At most so many rows of a table: means of equally many that follow each other."""
    if len(points) <= most:
        return points
    edges = np.linspace(0, len(points), most + 1).astype(int)
    sums = np.add.reduceat(points, edges[:-1], axis=0)
    return sums / np.diff(edges)[:, None]
