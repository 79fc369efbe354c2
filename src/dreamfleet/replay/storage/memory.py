"""Chunks mapped at chosen addresses.

A column of all chunks is one strided array, so a batch for sixteen streams is one write a column.
Writing rows with `pwritev` instead of through the mapping was slower: 45,000 against 63,000 image
steps a second.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import StorageFullError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# It keeps Python's lock: to get it back from a thread that samples takes longer than the call.
_madvise = ctypes.PyDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
_NOTHING = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_MS_SYNC = 4 if sys.platform == "linux" else 0x10
_MADV_WILLNEED = 3
_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE


class Arena:
    """`slots` equal slots of address space, each mapped to a file, to memory, or not at all.

    The standard library's `mmap` cannot place a mapping at a chosen address and keeps a file
    descriptor open for each (a large replay has thousands), hence the calls into libc. Reserving
    addresses takes no memory until a slot is mapped. Touching an unmapped slot would crash the
    process, so only `Store` holds these arrays, and it never hands one out.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._base = _map(None, slot_bytes * slots, _NOTHING, _RESERVED, -1)
        # Runs at the latest when the arena is collected, so a forgotten replay leaks nothing.
        self.close = weakref.finalize(self, _libc.munmap, self._base, slot_bytes * slots)

    def map_file(self, slot: int, fd: int) -> None:
        """Map the whole file; the descriptor may be closed afterwards."""
        self._map_slot(slot, _READ_WRITE, mmap.MAP_SHARED, fd)

    def read_ahead(self, slot: int, wanted: bool) -> None:
        """Whether touching a page brings in those behind it, as the kernel does by itself."""
        advice = mmap.MADV_NORMAL if wanted else mmap.MADV_RANDOM
        _madvise(self._address(slot), self.slot_bytes, advice)

    def map_memory(self, slot: int) -> None:
        self._map_slot(slot, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def unmap(self, slot: int) -> None:
        self._map_slot(slot, _NOTHING, _RESERVED, -1)

    def column(
        self, offset: int, dtype: np.dtype[Any], steps: int, shape: tuple[int, ...] = ()
    ) -> NDArray[Any]:
        """A strided view of one column over all slots: `[slot, step, *shape]`."""
        buffer: Any = (ctypes.c_char * (self.slot_bytes * self.slots)).from_address(self._base)
        inner = np.empty((1, *shape), dtype).strides
        return np.ndarray(
            (self.slots, steps, *shape), dtype, buffer, offset, (self.slot_bytes, *inner)
        )

    def sync(self, slot: int) -> None:
        """Write the slot's dirty pages to its file; a slot that is unmapped has none."""
        if _libc.msync(self._address(slot), self.slot_bytes, _MS_SYNC):
            error = ctypes.get_errno()
            if error != errno.ENOMEM:
                raise StorageFullError(
                    f"The replay's steps could not be written to disk ({os.strerror(error)}): "
                    "check the disk; a checkpoint taken now would not survive a power failure."
                )

    def populate(self, slot: int, start: int, end: int) -> None:
        """Have the pages under these bytes of a slot ready for writing, where the kernel can.

        Asked for together, pages take a third less CPU time than with a fault for each. Pages of a
        file are first brought into the kernel's cache.
        """
        start -= start % _PAGE
        for advice in (_MADV_WILLNEED, _MADV_POPULATE_WRITE):
            _madvise(self._address(slot) + start, end - start, advice)

    def _address(self, slot: int) -> int:
        return self._base + slot * self.slot_bytes

    def _map_slot(self, slot: int, protection: int, flags: int, fd: int) -> None:
        assert 0 <= slot < self.slots
        _map(self._address(slot), self.slot_bytes, protection, flags | _FIXED, fd)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, 0)
    if result == _FAILED:
        raise StorageFullError(
            f"The operating system refused to map {size:,} bytes "
            f"({os.strerror(ctypes.get_errno())}): lower the replay's capacity, or raise `chunk` "
            "so that there are fewer, larger files."
        )
    return int(result)
