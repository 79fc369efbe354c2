"""The commit journal: the one place that says which steps count.

Every step carries a tick, a number that grows by one a step. A batch may touch many chunk files;
it becomes valid, all of it, when the committed tick here moves past it, which is one store of
eight bytes. Killed before that store the batch never happened; killed after it the batch is
whole. Nothing has to be flushed for this: pages of a killed process stay with the kernel. Only
the machine itself going down can lose what was not synced (`Replay.sync`, and every checkpoint).

The journal also remembers, for each source of numbered batches, which numbers were added. A
record has two copies: the one not in use is overwritten and carries the tick its batch will be
committed at, so it takes effect with the very same store.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from dreamfleet.replay.errors import BatchOrderError, ReplayError

FILENAME = "journal"
MAX_SOURCES = 4096
WINDOW = 64
"""How many numbers below the newest of a source are told apart."""

_MAGIC = int.from_bytes(b"DFJOURN\x01", "little")
_HEADER_WORDS = 8
_MAGIC_WORD, _COMMITTED_WORD, _ID_WORD = 0, 1, 2
_COPY = np.dtype([("newest", "<u8"), ("mask", "<u8"), ("tick", "<u8")])
_RECORD = np.dtype([("key", "<u8", 2), ("copies", _COPY, 2)])
_SIZE = _HEADER_WORDS * 8 + MAX_SOURCES * _RECORD.itemsize

Source = int | str | bytes


class Journal:
    """The committed tick and the batches seen, in a mapped file or in memory."""

    def __init__(self, directory: Path | None) -> None:
        self.was_damaged = False
        if directory is None:
            self._map = mmap.mmap(-1, _SIZE)
        else:
            self._map = _open(directory / FILENAME)
        words = np.frombuffer(self._map, "<u8", _HEADER_WORDS)
        if words[_MAGIC_WORD] != _MAGIC:
            self.was_damaged = bool(words.any())
            self._map[:] = bytes(_SIZE)
            words[_ID_WORD : _ID_WORD + 2] = np.frombuffer(os.urandom(16), "<u8")
            words[_MAGIC_WORD] = _MAGIC
        self._words = words
        self._records: Any = np.frombuffer(
            self._map, _RECORD, MAX_SOURCES, offset=_HEADER_WORDS * 8
        )
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []
        self._read_records()

    @property
    def id(self) -> bytes:
        """Identifies the directory, also after it was moved."""
        return bytes(self._words[_ID_WORD : _ID_WORD + 2].tobytes())

    @property
    def committed(self) -> int:
        """Steps with ticks up to and including this one count."""
        return int(self._words[_COMMITTED_WORD])

    def commit(self, tick: int) -> None:
        self._words[_COMMITTED_WORD] = tick

    def newest(self, source: Source) -> int | None:
        """The highest batch number that was committed for the source."""
        row = self._rows.get(_key(source))
        return None if row is None else int(self._current(row)["newest"])

    def seen(self, source: Source, seq: int) -> bool:
        """Whether that batch of the source was committed before."""
        row = self._rows.get(_key(source))
        if row is None:
            return False
        record = self._current(row)
        behind = int(record["newest"]) - seq
        if behind < 0:
            return False
        if behind >= WINDOW:
            raise BatchOrderError(
                f"Batch {seq} of source {source!r} comes after batch {record['newest']}: batches "
                f"of one source may be at most {WINDOW - 1} numbers late. Send them in order, "
                "and give a restarted sender a new source name."
            )
        return bool(int(record["mask"]) >> behind & 1)

    def stage(self, source: Source, seq: int, tick: int) -> None:
        """Note the batch; it counts as seen once `tick` is committed."""
        key = _key(source)
        row = self._rows.get(key)
        newest, mask = seq, 0
        if row is None:
            row = self._claim(key)
        else:
            current = self._current(row)
            newest, mask = int(current["newest"]), int(current["mask"])
        ahead = seq - newest
        if ahead > 0:
            newest, mask = seq, mask << ahead if ahead < WINDOW else 0
        mask |= 1 << newest - seq
        spare = self._records[row]["copies"][1 - self._active(row)]
        spare["newest"], spare["mask"] = newest, mask & (1 << WINDOW) - 1
        spare["tick"] = tick

    def forget_uncommitted(self) -> None:
        """Drop what was staged for a batch that was never committed."""
        ticks = self._records["copies"]["tick"]
        ticks[ticks > self.committed] = 0
        self._read_records()

    def flush(self) -> None:
        self._map.flush()

    def _read_records(self) -> None:
        ticks = self._records["copies"]["tick"]
        valid = ((ticks > 0) & (ticks <= self.committed)).any(1)
        keys = self._records["key"]
        self._rows = {keys[row].tobytes(): int(row) for row in np.flatnonzero(valid)}
        self._free = np.flatnonzero(~valid)[::-1].tolist()

    def _active(self, row: int) -> int:
        ticks = self._records[row]["copies"]["tick"]
        valid = np.where(ticks <= self.committed, ticks, 0)
        return int(valid.argmax())

    def _current(self, row: int) -> Any:
        return self._records[row]["copies"][self._active(row)]

    def _claim(self, key: bytes) -> int:
        """A record for a new source; when all are taken, the one longest unused gives way."""
        if not self._free:
            newest = self._records["copies"]["tick"].max(1)
            row = int(newest.argmin())
            del self._rows[self._records[row]["key"].tobytes()]
        else:
            row = self._free.pop()
        record = self._records[row]
        record["copies"]["tick"] = 0
        record["key"] = np.frombuffer(key, "<u8")
        self._rows[key] = row
        return row


def read_committed(directory: Path) -> tuple[bytes, int] | None:
    """Id and committed tick of another run's journal, which is only read; None if it has none."""
    try:
        with (directory / FILENAME).open("rb") as file:
            words = np.frombuffer(file.read(_HEADER_WORDS * 8), "<u8")
    except FileNotFoundError:
        return None
    if len(words) < _HEADER_WORDS or words[_MAGIC_WORD] != _MAGIC:
        return None
    return words[_ID_WORD : _ID_WORD + 2].tobytes(), int(words[_COMMITTED_WORD])


def _open(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size < _SIZE:
            os.pwrite(fd, bytes(_SIZE - os.fstat(fd).st_size), os.fstat(fd).st_size)
        return mmap.mmap(fd, _SIZE)
    except OSError as error:
        raise ReplayError(f"The replay's journal {path} cannot be used: {error}.") from error
    finally:
        os.close(fd)


def _key(source: Source) -> bytes:
    kind = type(source).__name__
    text = source if isinstance(source, bytes) else str(source).encode()
    return hashlib.blake2b(kind.encode() + b":" + text, digest_size=16).digest()
