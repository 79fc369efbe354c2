"""A count that outlives its process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

_SIZE = 8


class Tally:
    """A number that only grows, in one word of a mapped file.

    A word is stored whole or not at all, and its page stays with the kernel, so the number is right
    wherever the process is killed. The machine going down may lose what was not flushed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.pwrite(descriptor, bytes(_SIZE), 0)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._word = np.frombuffer(self._map, "<u8")

    @property
    def value(self) -> int:
        return int(self._word[0])

    def add(self, count: int) -> None:
        """Only one thread at a time may add."""
        self._word[0] += np.uint64(count)

    def flush(self) -> None:
        self._map.flush()
