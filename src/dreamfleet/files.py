"""Files that survive kills: whole contents, temporary directories, and counters in mapped files.

A reader of `atomic_write` finds the old content or the new one, never a part.

Each of the `DurableCounters` has two copies, and each copy a serial number and a checksum. A new
value goes into the older copy, its checksum last. So after a kill at any moment one copy is whole,
with the new value or the one before. Nothing has to be flushed for this: pages of a killed process
stay with the kernel. A power cut may lose what came after the last flush.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import DreamfleetError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Without a line of input this process was killed. Others may write there for some seconds: they end
# with it.
_REMOVE = 'read _ || for _ in $(seq 25); do rm -rf "$0"; sleep 0.2; done'


def atomic_write(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content: written under a temporary name, fsynced, then renamed.

    The directory is made if it is missing, and fsynced too, so that the new name survives a power
    cut. Concurrent writers do not disturb each other; the last one wins.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def open_now(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe under its name is empty, instead of never being opened."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_now(path: Path) -> bytes:
    """What a file holds; see `open_now`."""
    with open_now(path) as file:
        return file.read() or b""


def read_json(path: Path, kind: type[T]) -> T | None:
    """What a file of JSON holds; None if there is none, or if it is damaged."""
    try:
        return msgspec.json.decode(read_now(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.debug("%s cannot be read: %s", path, error)
        return None


def atomic_rename(temporary: Path, path: Path) -> None:
    """Give a complete file or directory its final name, so that both survive a power cut.

    For what another program or library has written under a temporary name beside it. A directory's
    files have to be fsynced already.
    """
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Bring a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_aside(folder: Path) -> Iterator[Path]:
    """A new folder under a temporary name, which it loses when the block ends. Of several writers
    the first wins, and nothing is left of a block that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id: containers that share a directory may all have the same one.
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    aside.mkdir()
    try:
        yield aside
        for each in (*aside.rglob("*"), aside):
            fsync(each)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        fsync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def temporary_folder(prefix: str = "dreamfleet-") -> Iterator[Path]:
    """A temporary directory that is removed when the block ends, or when this process is killed."""
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as name,
        subprocess.Popen(
            ["sh", "-c", _REMOVE, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        ) as guard,
    ):
        try:
            yield Path(name)
        finally:
            shutil.rmtree(name, ignore_errors=True)
            guard.communicate(b"\n")


# --- counters in a mapped file -------------------------------------------------------------------

Words = NDArray[np.uint64]

_COPY_WORDS = 3  # value, serial number, checksum
COUNTER_WORDS = 2 * _COPY_WORDS
"""Words of the file that a number takes."""

_WORD = (1 << 64) - 1
_SEED, _PRIME = 0xCBF29CE484222325, 0x100000001B3


def map_words(path: Path | None, words: int) -> mmap.mmap:
    """The file, mapped, with room for so many words; None keeps them in memory."""
    size = 8 * words
    if path is None:
        return mmap.mmap(-1, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        reserve(descriptor, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise DreamfleetError(
            f"There is no room for {path} ({error.strerror}): free disk space, or use another "
            "logdir."
        ) from error
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Give a file its bytes on the disk; what it holds stays.

    Without them a full disk is noticed when a mapped page is written, which is a SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(os.fstat(descriptor).st_size, size, 1 << 20):
        os.pwrite(descriptor, bytes(min(1 << 20, size - start)), start)


def checksum(*words: int) -> int:
    """A checksum of words that changes with any of them, and is not zero for zeros."""
    mixed = _SEED
    for word in words:  # an odd factor loses nothing, so no two values of a word give the same
        mixed = (mixed ^ word) * _PRIME & _WORD
    return mixed


class DurableCounters:
    """Whole numbers, from -2^63 to 2^63 - 1, in words of a mapped file. Not thread-safe.

    Args:
        words: `COUNTER_WORDS` for each of them.
        salt: Makes checksums different, so that no other file's pass for them.
    """

    def __init__(self, words: Words, salt: int = 0) -> None:
        self._copies = words.reshape(-1, 2, _COPY_WORDS)
        self._salt = salt
        self._newest: list[tuple[int, int]] = []
        self.values: list[int | None] = []
        """What was set last; None for one that never was, or that is damaged."""
        self.doubtful: list[bool] = []
        """Of which numbers a copy is neither whole nor unused: setting it was interrupted, or it is
        damaged. What was set last may then be another value than the one in `values`."""
        for index in range(len(self._copies)):
            self._read(index)

    def set(self, index: int, value: int) -> None:
        """Set a number, all of it or nothing."""
        copy, serial = self._newest[index]
        copy, serial = 1 - copy, serial + 1
        words = self._copies[index, copy]
        bits = value & _WORD
        words[0], words[1] = bits, serial
        words[2] = checksum(self._salt, index, bits, serial)
        self._newest[index] = copy, serial
        self.values[index] = value

    def _read(self, index: int) -> None:
        copies = self._copies[index].tolist()
        found: list[tuple[int, int, int]] = []
        for copy, (bits, serial, check) in enumerate(copies):
            if check == checksum(self._salt, index, bits, serial):
                found.append((serial, copy, bits))
        serial, copy, bits = max(found, default=(0, 1, -1))
        # The second time a number is set, its other copy is used too.
        unused = copies.count([0, 0, 0]) if serial < 2 else 0
        self._newest.append((copy, serial))
        self.values.append(None if not found else bits - (bits >> 63 << 64))
        self.doubtful.append(len(found) + unused < 2)
