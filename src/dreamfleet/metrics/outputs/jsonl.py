"""Append-only files of JSON lines, which survive being killed at any byte.

A line is written by one call and ends with a newline; a file that does not end with one was torn,
and what follows its last newline is cut off when it is opened again.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from dreamfleet.files import open_now
from dreamfleet.metrics.outputs.base import EVAL_STEP, Output, kind_of

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20
_ROWS = msgspec.json.Decoder(dict[str, Any])
DAMAGED = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding a damaged line or file raises."""


class JsonlFile:
    """Appends rows. NaN and infinity, which JSON does not have, are written as null."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._repair()

    def append(self, row: Mapping[str, Any]) -> None:
        plain = {key: _plain(value) for key, value in row.items()}
        data = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._fd, data)
        if written < len(data):
            # A full disk can take half a line. It is cut off again.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(f"{self._path} could not be written: free disk space.")

    def tail(self) -> list[dict[str, Any]]:
        """The last rows, some thousands of them."""
        with self._path.open("rb") as file:
            return last_rows(file, _TAIL_BYTES)

    def last_value(self, key: str, start: str) -> str:
        """The text of a key in the last row in which it starts like this; empty if there is none.
        It is the last key of its row."""
        size, wanted = os.fstat(self._fd).st_size, f'"{key}":"{start}'.encode()
        if not size:
            return ""
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as content:
            at = content.rfind(wanted)
            line = content[at : content.find(b"\n", at)] if at >= 0 else b""
        return line.partition(b'":"')[2].partition(b'"')[0].decode(errors="replace")

    def flush(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _repair(self) -> None:
        if not (size := os.fstat(self._fd).st_size):
            return
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as content:
            keep = content.rfind(b"\n") + 1
        if keep < size:
            log.warning("%s ended in the middle of a line; cut %d bytes", self._path, size - keep)
            os.ftruncate(self._fd, keep)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a file that is seldom written."""
    with closing(JsonlFile(path)) as file:
        file.append(row)


def read_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """The rows of a file, also of one that is being written. Null stands for NaN or infinity.

    A torn last line is skipped silently, because it will be completed or repaired. Any other line
    that does not parse is reported.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            rows = decode_rows(line)
            yield from rows
            if not rows:
                log.warning("%s line %d is damaged and was skipped", path, number)


class JsonlTail:
    """Complete lines of a file that grows; each is read once. A file that was replaced or truncated
    is read from its start.

    Args:
        path: The file, which may be missing.
        from_end: Leave out what the file holds now.
        opener: Opens the file for reading; None for the usual way.
    """

    def __init__(
        self,
        path: Path,
        *,
        from_end: bool = False,
        opener: Callable[[], AbstractContextManager[IO[bytes]]] | None = None,
    ) -> None:
        self._open = opener or partial(open_now, path)
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._inode = 0
        self.behind = False
        """Whether there is more to read."""
        self.replaced = False
        """Whether the last block is the first one of another file."""

    def read(self) -> list[dict[str, Any]]:
        """The rows that are new. Damaged ones are left out."""
        return decode_rows(self.block())

    def lines(self, most: float = math.inf) -> list[bytes]:
        """The lines that are new, until so many bytes were read."""
        return self.block(most).splitlines()

    def block(self, most: float = math.inf) -> bytes:
        """The lines that are new, until so many bytes were read; a longer line is left out."""
        try:
            with self._open() as file:
                found = os.fstat(file.fileno())
                other = self._inode not in (0, found.st_ino)
                self.replaced = other or found.st_size < self._offset
                self._offset = 0 if self.replaced else self._offset
                self._inode = found.st_ino
                file.seek(self._offset)
                size = int(min(most, found.st_size - self._offset))
                block = file.read(size) + file.readline(size)
        except OSError:
            return b""
        self.behind = self._offset + len(block) < found.st_size
        end = block.rfind(b"\n") + 1
        self._offset += end or len(block) * self.behind  # parts of a long line are damaged rows
        return block[:end]


def decode_rows(block: bytes) -> list[dict[str, Any]]:
    """The rows of some lines. Damaged ones are left out."""
    with suppress(*DAMAGED):
        return _ROWS.decode_lines(block)  # all at once is faster
    rows = []
    for line in block.splitlines():
        with suppress(*DAMAGED):
            rows.append(_ROWS.decode(line))
    return rows


def last_rows(file: IO[bytes], most: int) -> list[dict[str, Any]]:
    """The rows that the last bytes of a file hold, at most so many; damaged ones are left out."""
    block = last_lines(file, most)
    return decode_rows(block[: block.rfind(b"\n") + 1])


def last_lines(file: IO[bytes], most: int) -> bytes:
    """The last bytes of a file, at most so many, from the start of a line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - most))
    block = file.read(most)
    return block if size <= most else block.partition(b"\n")[2]


class JsonlOutput(Output):
    """Scalars and text, one line for each write, with the step under `step`.

    Steps do not go back: an evaluation, which belongs to the step at which it began, stands where
    it ended, and has its own step under `eval/step`.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = JsonlFile(path)
        self._step = max((int(row.get("step", 0)) for row in self._file.tail()[-1:]), default=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {key: v for key, v in metrics.items() if kind_of(v) in ("scalar", "text")}
        if EVAL_STEP not in row:
            self._step = step
        if row:
            self._file.append({"step": max(step, self._step), **row})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ScoresFile:
    """A line for each finished episode, `{"step": ..., "episode/score": ..., "id": ...}`.

    The id is `REPLAY/EPOCH/TICK`. Ticks of a replay rise, so its last line says what to ask for
    next, also to another process that opens the file.

    Args:
        path: The file.
        prefix: How the names of score and length begin.
        lazy: Whether the file is made with its first line.
    """

    def __init__(self, path: Path | str, prefix: str = "episode", *, lazy: bool = False) -> None:
        self._path, self._prefix = Path(path), prefix
        self._file = JsonlFile(path) if self._path.exists() or not lazy else None
        self._cursors: dict[str, tuple[str, int]] = {}
        rows = self._file.tail() if self._file else []
        scores = (row.get(f"{prefix}/score") for row in rows)
        self.last: list[float] = [score for score in scores if isinstance(score, float)]
        """Scores that were in the file when it was opened: the last ones."""

    def cursor(self, replay: str) -> tuple[str, int]:
        """Epoch and tick of the newest episode of a replay; an empty name if there is none."""
        if replay not in self._cursors:
            last = self._file.last_value("id", f"{replay}/") if self._file else ""
            _, epoch, tick = (last or "//0").rsplit("/", 2)
            self._cursors[replay] = epoch, int(tick)
        return self._cursors[replay]

    def add(self, step: int, score: float, length: int, replay: str, epoch: str, tick: int) -> bool:
        """Write an episode; returns whether it was not there before."""
        if (before := self.cursor(replay))[0] == epoch and tick <= before[1]:
            return False
        names = {f"{self._prefix}/score": score, f"{self._prefix}/length": length}
        now = {"time": round(time.time(), 1), "id": f"{replay}/{epoch}/{tick}"}
        self._file = self._file or JsonlFile(self._path)
        self._file.append({"step": step, **names, **now})
        self._cursors[replay] = epoch, tick
        return True

    def flush(self) -> None:
        if self._file:
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    number = np.asarray(value)
    if number.dtype.kind in "biu":
        return number.item()
    real = float(number)
    return real if math.isfinite(real) else None
