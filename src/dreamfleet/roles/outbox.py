"""Episodes that have ended, on their way to the logger: each reaches `scores.jsonl` exactly once.

An actor follows the episodes of its environments, because those that are under way end with it. The
message that stores the last step of an episode also tells its score. Before that step is committed,
the replay notes the score in a file; what was noted and never committed is dropped when the file is
opened. So a score is there exactly if all steps of its episode were stored, whoever is killed.

The file has its room from the start, so a disk that is full holds up nobody whose episode ends.

From here it is sent to the logger, again and again until that has answered. It has an id, under
which the logger writes it once.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.transport import ArgumentError, Client, Future, RemoteError, TransportError

log = logging.getLogger(__name__)

MOST_SENT = 256
"""Episodes in a message."""
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 1.0  # after the logger could not take them
EPISODE = {"step": np.int64, "score": np.float64, "length": np.int64, "time": np.float64}
"""What is told of an episode, and its dtypes."""

_ROOM = 1 << 16

Row = dict[str, Any]
"""An episode: its id, what is told of it, and `at`, where its line is in the file."""


class Outbox:
    """Scores between the commit that stores an episode's last step and the logger's answer. Any
    thread may call the methods, but only one stores steps.

    Args:
        path: The file.
        tick: Steps that the replay has committed.
        shard: Which of the replay's shards this is.
    """

    def __init__(self, path: Path, tick: int, shard: int = 0) -> None:
        self._shard = shard
        self._lock = threading.Lock()
        self._file = _Lines(path)
        self._waiting: list[Row] = []
        end = 0
        for line in self._file.lines:
            try:
                row = _read(line)
                if row.pop("tick") > tick:
                    break
                told = {key: row[key] for key in EPISODE}
                self._waiting.append({"id": str(row["id"]), "at": end, **told})
            except (ValueError, TypeError, KeyError, AttributeError):
                log.warning("%s is damaged: a score in it may be lost.", path)
            end += len(line)
        # Without what was never committed, whose ticks other steps will get.
        self._file.cut(end)
        self._noted: tuple[int, int, list[Row]] | None = None
        self._sent: tuple[Future, int] | None = None
        self._not_before = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, tick: int, source: str, seq: int, ended: Mapping[str, Any]) -> None:
        """Episodes end with steps that are about to be committed, the last of them with this tick.

        Args:
            tick: Of the last of these steps.
            source: Who sends the steps.
            seq: The number of the message.
            ended: `step`, `score` and `length` of each episode.
        """
        columns = zip(ended["step"], ended["score"], ended["length"], strict=True)
        now = round(time.time(), 1)
        rows = [
            {
                "id": f"{source}/{self._shard}/{seq}/{index}",
                "step": int(step),
                "score": float(score),
                "length": int(length),
                "time": now,
            }
            for index, (step, score, length) in enumerate(columns)
        ]
        lines = [_line({"tick": tick, **row}) for row in rows]
        with self._lock:
            at = self._file.end
            self._noted = tick, at, rows
            self._file.append(b"".join(lines))
            for row, line in zip(rows, lines, strict=True):
                row["at"], at = at, at + len(line)

    def settle(self, tick: int) -> None:
        """The replay has committed steps up to this one: what was noted counts, or is dropped."""
        with self._lock:
            if self._noted is None:
                return
            (last, end, rows), self._noted = self._noted, None
            if last <= tick:
                self._waiting += rows
            else:
                self._file.cut(end)

    def send(self, logger: Client) -> None:
        """Send what waits, unless something is on its way. Does not wait."""
        if not self._waiting or time.monotonic() < self._not_before:
            return
        with self._lock:
            try:
                if self._sent is not None:
                    reply, count = self._sent
                    if not reply.done():
                        return
                    self._sent = None
                    try:
                        reply.result()
                    except RemoteError as error:
                        if error.kind != ArgumentError.__name__:
                            raise
                        log.warning("%d scores were damaged, and are lost: %s", count, error)
                    del self._waiting[:count]
                    self._shrink()
                if rows := self._waiting[:MOST_SENT]:
                    ids = [row["id"] for row in rows]
                    columns = {k: np.array([r[k] for r in rows], t) for k, t in EPISODE.items()}
                    self._sent = logger.call("ended", ids, columns), len(rows)
            except TransportError as error:
                self._not_before = time.monotonic() + _PAUSE_SECONDS
                log.warning("The scores of episodes are sent again: %s", error)

    def _shrink(self) -> None:
        """Move the lines that wait to the start of the file, if those that do not have made enough
        room there. Killed meanwhile, the file holds some of them twice, and the logger knows them
        by their ids."""
        start = self._waiting[0]["at"] if self._waiting else self._file.end
        if self._noted is None and self._file.move(start):
            for row in self._waiting:
                row["at"] -= start

    def flush(self, logger: Client, timeout: float) -> None:
        """Wait until the logger has everything. What it has not got stays for the next start."""
        deadline = time.monotonic() + timeout
        while self._waiting and time.monotonic() < deadline:
            self.send(logger)
            time.sleep(_LOOK_SECONDS)
        if self._waiting:
            log.warning(
                "The logger has not taken %d scores; they are written when the run is resumed.",
                len(self._waiting),
            )

    def close(self) -> None:
        self._file.close()


def _line(row: Row) -> bytes:
    text = json.dumps(row).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _read(line: bytes) -> Row:
    text, _, checksum = line.rpartition(b" ")
    if zlib.crc32(text) != int(checksum, 16):
        raise ValueError("The checksum is wrong.")
    row: Row = json.loads(text)
    return row


class _Lines:
    """Lines in a file that ends with the first zero: its room is reserved."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._room = len(content)
        whole = content.partition(b"\0")[0].rpartition(b"\n")
        self.lines = (whole[0] + whole[1]).splitlines(keepends=True)
        """Those that were in the file when it was opened."""
        self.end = 0
        self._reserve(1)

    def append(self, data: bytes) -> None:
        self._reserve(len(data) + 1)
        os.pwrite(self._fd, data + b"\0", self.end)
        self.end += len(data)

    def cut(self, end: int) -> None:
        """Keep this many bytes."""
        os.pwrite(self._fd, b"\0", end)
        self.end = end

    def move(self, start: int) -> bool:
        """Keep what follows the first `start` bytes, if it fits in their place; returns whether it
        does."""
        if 2 * start < self.end:
            return False
        kept = os.pread(self._fd, self.end - start, start)
        os.pwrite(self._fd, kept + b"\0", 0)
        self.end = len(kept)
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _reserve(self, size: int) -> None:
        while self._room < self.end + size:
            os.pwrite(self._fd, bytes(_ROOM), self._room)
            self._room += _ROOM
