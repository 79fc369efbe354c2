"""Arrays that are used again once nobody looks at them any more.

A fresh batch of images costs more time in page faults than in copying. The pool keeps a reference
to each buffer it made and lends out views; a view keeps its buffer alive, so a buffer whose only
reference is the pool's own is free. Nobody has to give anything back.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALL = 64 << 10
_PAGE = 4096
# Copies into a buffer that numpy aligns (to 16 bytes) run at half the speed of the same copies
# into one aligned to a cache line, and a little slower when source and target lie at the same
# place in their pages. Rows in chunks tend to start at 0 or 2048, so targets start in between.
_PLACE_IN_PAGE = 1024
_KEEP = 8
_SIZES = 32

_Buffers = list[NDArray[np.uint8]]


def _references(buffers: _Buffers, which: int) -> int:
    return sys.getrefcount(buffers[which])


# What the count is when only the list holds the buffer; it differs between versions of Python.
_ONLY_THE_LIST = _references([np.empty(1, np.uint8)], 0)


class BufferPool:
    """A few buffers for each of the numbers of bytes that were asked for last."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffers] = {}
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array that nobody else holds."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            owner = self._find(size)
            start = (_PLACE_IN_PAGE - owner.ctypes.data) % _PAGE
            # Views of views refer to the array that owns the memory, so it is the one to watch.
            return owner[start : start + size].view(dtype).reshape(shape)

    def _find(self, size: int) -> NDArray[np.uint8]:
        # Taken out and put in again: the size that nobody asked for longest comes first.
        buffers = self._buffers[size] = self._buffers.pop(size, [])
        if len(self._buffers) > _SIZES:
            del self._buffers[next(iter(self._buffers))]
        for which in range(len(buffers)):
            if _references(buffers, which) == _ONLY_THE_LIST:
                return buffers[which]
        buffer = np.empty(size + _PAGE, np.uint8)
        if len(buffers) < _KEEP:
            buffers.append(buffer)
        return buffer
