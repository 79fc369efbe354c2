"""The commit journal: the one place that says which steps count.

Every step carries a tick, a number that grows by one a step. A batch may touch many chunk files;
it becomes valid, all of it, when the committed tick here moves past it. After a kill before that
the batch never happened; after a kill behind it the batch is complete. Nothing has to be flushed
for this: pages of a killed process stay with the kernel, so a commit costs no system call.

A power cut loses any of the pages that the kernel has not written yet. So rows are synced now and
then, and after them a copy of the journal as it was before, with the boot ID, in one of two further
files in turn (`Journal.flush`). If a directory was not closed and the boot ID has changed, it is
opened with that copy, and rows behind its tick are dropped. A killed run that is moved to another
machine is treated alike. Without a boot ID (not Linux) every process counts as another boot.

The journal also remembers, for each source of numbered batches, which numbers were added. A
record has two copies: the one not in use is overwritten and carries the tick its batch will be
committed at, so it takes effect with the same commit.

Everything here has a checksum. What does not agree with its own is not believed: a commit that was
interrupted leaves the committed tick from before (`dreamfleet.files`). A journal that is lost is
made again from the chunks, and the damaged one is kept beside it.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import logging
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.files import (
    COUNTER_WORDS,
    DurableCounters,
    Words,
    atomic_write,
    checksum,
    map_words,
    reserve,
)
from dreamfleet.replay.errors import BatchOrderError, ReplayError, StorageFullError

log = logging.getLogger(__name__)

FILENAME = "journal"
SYNCED = ("synced-0", "synced-1")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_SOURCES = 4096
WINDOW = 64
"""How many numbers below the newest of a source are told apart."""

DAMAGED = "damaged"
"""The folder, in the replay's directory, where what cannot be trusted is moved."""

_MAGIC = int.from_bytes(b"DFJOURN\x02", "little")
_ANY_VERSION = (1 << 56) - 1
# Magic, id, checksum of the id, and the committed tick.
_MAGIC_WORD, _ID_WORD, _ID_CHECK_WORD, _COMMITTED_WORD = 0, 1, 3, 4
_HEADER_WORDS = _COMMITTED_WORD + COUNTER_WORDS
# A record is a key of two words and two copies of four: newest number, mask, tick, checksum.
_RECORD_WORDS = 10
_COPY_AT = (2, 6)
_COPY_WORDS = 4
_NEWEST, _MASK, _TICK, _CHECK = 0, 1, 2, 3
_SIZE = 8 * (_HEADER_WORDS + MAX_SOURCES * _RECORD_WORDS)

# A synced journal: digest; serial number, boot, whether the replay was closed, word count; words.
_DIGEST_BYTES = 16
_SYNCED_HEAD = struct.Struct("<Q16s?Q")

Source = int | str | bytes


class LeftBy(enum.Enum):
    """How the process that used a directory before has left it."""

    UNKNOWN = "a new directory, one of an older version, or one whose journal is damaged"
    CLOSE = "closed: everything is on the disk"
    KILL = "killed in this boot: everything is in the kernel's cache or on the disk"
    POWER_CUT = "not closed, and another boot: only what was synced is on the disk"


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
        path = directory / FILENAME if directory else None
        # One that has lost its end may have lost the newest of what it knew.
        cut_off = path is not None and path.exists() and path.stat().st_size < _SIZE
        self._map = map_words(path, _SIZE // 8)
        # Stores of whole words: a word is never half written, wherever the process is killed.
        self._words = np.frombuffer(self._map, "<u8")
        self._directory, self._boot = directory, _boot_id()
        synced = _read_synced(directory) if directory else None
        self._serial = synced.serial if synced else 0
        self.left_by = LeftBy.UNKNOWN
        if synced is not None:
            unclosed = LeftBy.KILL if synced.boot == self._boot else LeftBy.POWER_CUT
            self.left_by = LeftBy.CLOSE if synced.closed else unclosed
        self.is_new = cut_off or _read_header(self._words) is None
        """Whether there was none, or only a damaged one; until `begin`, also if killed before."""
        if self.is_new:
            self._refuse_other_version(directory)
        if synced is not None and self.left_by is not LeftBy.KILL:
            # If this is interrupted, the next start does it again.
            self._words[:], self.is_new = synced.words, False
        if self.is_new:
            self.left_by = LeftBy.UNKNOWN
            # Without either, a first start was interrupted: there is nothing to keep.
            used = self._words[_MAGIC_WORD] or self._words[_HEADER_WORDS:].any()
            if directory is not None and used:
                _keep_damaged(directory, self._map[:])
            self._words[:_HEADER_WORDS] = 0  # records speak for themselves
            self.identify(os.urandom(16))
        self._records = self._words[_HEADER_WORDS:].reshape(MAX_SOURCES, _RECORD_WORDS)
        self._sources: dict[bytes, _Seen] = {}
        self._free: list[int] = []
        self._staged: tuple[bytes, _Seen] | None = None
        self._number = _committed_number(self._words)
        self.committed = self._number.values[0] or 0
        """Steps with ticks up to and including this one count."""
        self._read_records()

    def _refuse_other_version(self, directory: Path | None) -> None:
        magic = int(self._words[_MAGIC_WORD])
        version = magic & ~_ANY_VERSION  # none in a file that was cut off there
        if version and magic != _MAGIC and (magic ^ _MAGIC) & _ANY_VERSION == 0:
            raise ReplayError(
                f"The replay in {directory} was written by another version of Dreamfleet: open "
                "it with that version, or use a new directory."
            )

    @property
    def id(self) -> bytes:
        """Identifies the directory, also after it was moved."""
        return self._words[_ID_WORD : _ID_WORD + 2].tobytes()

    def identify(self, run: bytes) -> None:
        """Take an id, which a journal that was lost finds in the chunks."""
        self._words[_ID_WORD : _ID_WORD + 2] = np.frombuffer(run, "<u8")
        self._words[_ID_CHECK_WORD] = checksum(*self._words[_ID_WORD : _ID_WORD + 2].tolist())
        self._words[_COMMITTED_WORD:_HEADER_WORDS] = 0  # whose checksums go with the id
        self._number = _committed_number(self._words)

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
        self._number.set(0, tick)

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
        record[at + _NEWEST], record[at + _MASK], record[at + _TICK] = new.newest, new.mask, tick
        record[at + _CHECK] = checksum(*record[:2].tolist(), new.newest, new.mask, tick)
        self._staged = key, new

    def forget_uncommitted(self) -> None:
        """Drop what was staged for a batch that was never committed."""
        self._staged = None
        ticks = self._valid_ticks()
        for column, at in enumerate(_COPY_AT):
            self._records[ticks[:, column] > self.committed, at : at + _COPY_WORDS] = 0
        self._read_records()

    def freeze(self) -> Words:
        """The used part of the journal as it is now, to be flushed once the steps up to its tick
        are synced."""
        rows = max((seen.row + 1 for seen in self._sources.values()), default=0)
        return self._words[: _HEADER_WORDS + rows * _RECORD_WORDS].copy()

    def flush(self, frozen: Words, *, closed: bool = False) -> None:
        """Let a journal survive a power cut, with the steps that it counts.

        Args:
            frozen: The journal; all its steps are on the disk.
            closed: Whether none will come after them.
        """
        if self._directory is None:
            return
        # Both at first, so that a disk that becomes full has room for them.
        for serial in range(self._serial + 1, max(self._serial + 2, 1 + len(SYNCED))):
            head = _SYNCED_HEAD.pack(serial, self._boot, closed, len(frozen))
            _write_synced(self._directory / SYNCED[serial % 2], head + frozen.tobytes())
            self._serial = serial
        self.left_by = LeftBy.KILL

    def _valid_ticks(self) -> NDArray[np.uint64]:
        """The tick of both copies of every record; 0 where a copy is unused or damaged."""
        ticks = self._records[:, [at + _TICK for at in _COPY_AT]]
        for row, column in np.argwhere(ticks).tolist():
            at = _COPY_AT[column]
            *words, check = self._records[row, at : at + _COPY_WORDS].tolist()
            if check != checksum(*self._records[row, :2].tolist(), *words):
                ticks[row, column] = 0
        return ticks

    def _read_records(self) -> None:
        ticks = self._valid_ticks()
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
        record[:] = 0
        record[:2] = np.frombuffer(key, "<u8")
        return row


def read_committed(directory: Path) -> tuple[bytes, int] | None:
    """Id and committed tick of another run's journal, which is only read; None if it has none."""
    synced = _read_synced(directory)
    if synced is not None and synced.boot != _boot_id():
        return _read_header(synced.words)
    try:
        with (directory / FILENAME).open("rb") as file:
            header = file.read(_HEADER_WORDS * 8)
    except FileNotFoundError:
        return None
    return _read_header(np.frombuffer(header, "<u8")) if len(header) == _HEADER_WORDS * 8 else None


def _read_header(words: Words) -> tuple[bytes, int] | None:
    """Id and committed tick; None if they are not there, or damaged."""
    run = words[_ID_WORD : _ID_WORD + 2]
    if int(words[_ID_CHECK_WORD]) != checksum(*run.tolist()):
        return None
    tick = _committed_number(words).values[0]
    return None if tick is None else (run.tobytes(), tick)


class _Synced(NamedTuple):
    """A journal that was flushed."""

    serial: int
    boot: bytes
    closed: bool
    words: Words


def _read_synced(directory: Path) -> _Synced | None:
    """The journal that was flushed last; None if there is none."""
    found = []
    for name in SYNCED:
        try:
            data = (directory / name).read_bytes()
        except FileNotFoundError:
            continue
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if len(data) < _SYNCED_HEAD.size:
            continue
        serial, boot, closed, used = _SYNCED_HEAD.unpack_from(data)
        data = data[: _SYNCED_HEAD.size + 8 * used]
        if digest == _digest(data):
            words = np.zeros(_SIZE // 8, np.uint64)
            words[:used] = np.frombuffer(data[_SYNCED_HEAD.size :], "<u8")
            found.append(_Synced(serial, boot, closed, words))
    return max(found, key=lambda each: each.serial, default=None)


def _write_synced(path: Path, body: bytes) -> None:
    data = _digest(body) + body
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            reserve(fd, len(data))
            os.pwrite(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageFullError(
            f"{path} cannot be written ({error.strerror}): check the disk; steps that are stored "
            "from now on would not survive a power cut."
        ) from error


def _boot_id() -> bytes:
    """Tells boots of machines apart."""
    try:
        boot = BOOT_ID.read_bytes().strip()
    except OSError:  # not Linux, or a container that hides it
        boot = b""
    return _digest(boot) if boot else _THIS_PROCESS


_THIS_PROCESS = os.urandom(_DIGEST_BYTES)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _committed_number(words: Words) -> DurableCounters:
    return DurableCounters(words[_COMMITTED_WORD:_HEADER_WORDS], salt=int(words[_ID_CHECK_WORD]))


def _keep_damaged(directory: Path, content: bytes) -> None:
    """Keep a damaged journal, whose place a new one takes."""
    path = damaged_path(directory, FILENAME)
    atomic_write(path, content)
    log.warning("The replay's journal is damaged; a new one is made, and it is kept as %s.", path)


def damaged_path(directory: Path, name: str) -> Path:
    """An unused place for something that cannot be trusted."""
    folder = directory / DAMAGED
    folder.mkdir(exist_ok=True)
    names = (name if number == 0 else f"{name}-{number}" for number in itertools.count())
    return next(folder / each for each in names if not (folder / each).exists())


@lru_cache(maxsize=64)
def _key(source: Source) -> bytes:
    # Numpy's integers and strings name the same source as the plain ones.
    kind = "bytes" if isinstance(source, bytes) else "str" if isinstance(source, str) else "int"
    text = source if isinstance(source, bytes) else str(source).encode()
    return hashlib.blake2b(kind.encode() + b":" + text, digest_size=16).digest()
