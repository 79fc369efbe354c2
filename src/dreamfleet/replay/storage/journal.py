"""The commit journal: the one place that says which steps count.

Every step carries a tick, a number that grows by one a step. A batch may touch many chunk files;
it becomes valid, all of it, when the committed tick here moves past it, which is one store of
eight bytes. After a kill before that store the batch never happened; after a kill behind it the
batch is complete. Nothing has to be flushed for this: pages of a killed process stay with the
kernel, so a commit costs no system call. Only a power failure can lose what was not synced
(`Replay.sync`, and every checkpoint).

The journal also remembers, for each source of numbered batches, which numbers were added. A
record has two copies: the one not in use is overwritten and carries the tick its batch will be
committed at, so it takes effect with the same store.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dreamfleet.replay.errors import BatchOrderError, ReplayError

FILENAME = "journal"
MAX_SOURCES = 4096
WINDOW = 64
"""How many numbers below the newest of a source are told apart."""

_MAGIC = int.from_bytes(b"DFJOURN\x01", "little")
_ANY_VERSION = (1 << 56) - 1
_HEADER_WORDS = 8
_MAGIC_WORD, _COMMITTED_WORD, _ID_WORD = 0, 1, 2
# A record is a key of two words and two copies of three: newest number, mask, tick.
_RECORD_WORDS = 8
_COPY_AT = (2, 5)
_NEWEST, _MASK, _TICK = 0, 1, 2
_SIZE = 8 * (_HEADER_WORDS + MAX_SOURCES * _RECORD_WORDS)

Source = int | str | bytes


class _Seen(NamedTuple):
    """The valid copy of a source's record."""

    row: int
    copy: int
    newest: int
    mask: int
    """Bit k: whether number `newest - k` was added."""
    tick: int


class Journal:
    """The committed tick and the batches seen, in a mapped file or in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._map = mmap.mmap(-1, _SIZE) if directory is None else _open(directory / FILENAME)
        # Stores of whole words: a word is never half written, wherever the process is killed.
        self._words = np.frombuffer(self._map, "<u8")
        magic = int(self._words[_MAGIC_WORD])
        self.is_new = magic != _MAGIC
        """Whether there was none, or only a damaged one; until `begin`, also if killed before."""
        if self.is_new:
            if (magic ^ _MAGIC) & _ANY_VERSION == 0:
                raise ReplayError(
                    f"The replay in {directory} was written by another version of Dreamfleet: open "
                    "it with that version, or use a new directory."
                )
            self._words[:] = 0
            self.identify(os.urandom(16))
        self._records = self._words[_HEADER_WORDS:].reshape(MAX_SOURCES, _RECORD_WORDS)
        self._sources: dict[bytes, _Seen] = {}
        self._free: list[int] = []
        self._staged: tuple[bytes, _Seen] | None = None
        self.committed = int(self._words[_COMMITTED_WORD])
        """Steps with ticks up to and including this one count."""
        self._read_records()

    @property
    def id(self) -> bytes:
        """Identifies the directory, also after it was moved."""
        return self._words[_ID_WORD : _ID_WORD + 2].tobytes()

    def identify(self, run: bytes) -> None:
        """Take an id, which a journal that was lost finds in the chunks."""
        self._words[_ID_WORD : _ID_WORD + 2] = np.frombuffer(run, "<u8")

    def begin(self, tick: int) -> None:
        """Make a new journal count, with steps up to `tick` committed."""
        self.commit(tick)
        self._words[_MAGIC_WORD] = _MAGIC
        self.is_new = False

    def commit(self, tick: int) -> None:
        """Make every step up to `tick` count, and the batch that was staged with it."""
        if self._staged:
            key, seen = self._staged
            self._sources[key], self._staged = seen, None
        # In this order: interrupted in between, the batch is taken in, and counts with the next.
        self.committed = tick
        self._words[_COMMITTED_WORD] = tick

    def newest(self, source: Source) -> int | None:
        """The highest batch number that was committed for the source."""
        seen = self._sources.get(_key(source))
        return None if seen is None else seen.newest

    def seen(self, source: Source, seq: int) -> bool:
        """Whether that batch of the source was committed before."""
        seen = self._sources.get(_key(source))
        if seen is None or seq > seen.newest:
            return False
        behind = seen.newest - seq
        if behind >= WINDOW:
            raise BatchOrderError(
                f"Batch {seq} of source {source!r} comes after batch {seen.newest}: batches of one "
                f"source may be at most {WINDOW - 1} numbers late. Send them in order, and give a "
                "restarted sender a new source name."
            )
        return bool(seen.mask >> behind & 1)

    def stage(self, source: Source, seq: int, tick: int) -> None:
        """Note the batch; it counts as seen once `tick` is committed."""
        key = _key(source)
        old = self._sources.get(key)
        if old is None:
            new = _Seen(self._claim(key), 0, seq, 1, tick)
        elif seq > old.newest:
            mask = (old.mask << seq - old.newest if seq - old.newest < WINDOW else 0) | 1
            new = _Seen(old.row, 1 - old.copy, seq, mask & (1 << WINDOW) - 1, tick)
        else:
            mask = old.mask | 1 << old.newest - seq
            new = _Seen(old.row, 1 - old.copy, old.newest, mask, tick)
        at = _COPY_AT[new.copy]
        record = self._records[new.row]
        record[at + _NEWEST], record[at + _MASK] = new.newest, new.mask
        record[at + _TICK] = tick
        self._staged = key, new

    def forget_uncommitted(self) -> None:
        """Drop what was staged for a batch that was never committed."""
        self._staged = None
        for at in _COPY_AT:
            ticks = self._records[:, at + _TICK]
            ticks[ticks > self.committed] = 0
        self._read_records()

    def flush(self) -> None:
        self._map.flush()

    def _read_records(self) -> None:
        ticks = self._records[:, [at + _TICK for at in _COPY_AT]]
        ticks[ticks > self.committed] = 0
        self._sources = {}
        for row in np.flatnonzero(ticks.any(1)).tolist():
            copy = int(ticks[row].argmax())
            at = _COPY_AT[copy]
            newest, mask, tick = self._records[row, at : at + 3].tolist()
            self._sources[self._records[row, :2].tobytes()] = _Seen(row, copy, newest, mask, tick)
        self._free = np.flatnonzero(~ticks.any(1))[::-1].tolist()

    def _claim(self, key: bytes) -> int:
        """A record for a new source; when all are taken, the one longest unused gives way."""
        if self._free:
            row = self._free.pop()
        else:
            oldest = min(self._sources, key=lambda source: self._sources[source].tick)
            row = self._sources.pop(oldest).row
        record = self._records[row]
        # The key last: it must never stand with what belonged to the source before.
        for at in _COPY_AT:
            record[at + _TICK] = 0
        record[:2] = np.frombuffer(key, "<u8")
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
    # Numpy's integers and strings name the same source as the plain ones.
    kind = "bytes" if isinstance(source, bytes) else "str" if isinstance(source, str) else "int"
    text = source if isinstance(source, bytes) else str(source).encode()
    return hashlib.blake2b(kind.encode() + b":" + text, digest_size=16).digest()
