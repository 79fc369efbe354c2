"""Numbers in a mapped file that survive kills, and that notice when a bit of them has changed.

Each number has two copies, and each copy a serial number and a checksum. A new value goes into the
older copy, its checksum last. So after a kill at any moment one copy is whole, with the new value
or the one before. Nothing has to be flushed for this: pages of a killed process stay with the
kernel. A power cut may lose what came after the last flush.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import DreamfleetError

Words = NDArray[np.uint64]

_COPY_WORDS = 3  # value, serial number, checksum
NUMBER_WORDS = 2 * _COPY_WORDS
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


class Numbers:
    """Whole numbers, from -2^63 to 2^63 - 1, in words of a mapped file. Not thread-safe.

    Args:
        words: `NUMBER_WORDS` for each of them.
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

    def __len__(self) -> int:
        return len(self.values)

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
