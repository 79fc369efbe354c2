"""One range of addresses that every chunk is mapped into.

Chunks live in equal slots of one reserved range, so a column of *all* chunks is a single strided
array `[slot, step, ...]`: a batch for sixteen streams is one write a column, whichever chunks they
go to. The standard library's `mmap` cannot place a mapping at a chosen address and keeps a file
descriptor open for each (a large replay has thousands), hence the three calls into libc.

Reserving costs nothing: no memory is used until a slot is mapped. Touching an unmapped slot would
be a crash, so only `Store` holds these arrays, and it never hands one out.
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
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
]

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
_NOTHING = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_MS_SYNC = 4 if sys.platform == "linux" else 0x10
_MADV_WILLNEED = 3
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_SYS_PROCESS_MADVISE = 440
_MAX_RANGES = 1024
_PAGE = mmap.PAGESIZE


class Arena:
    """`slots` equal slots of address space, each mapped to a file, to memory, or not at all."""

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
        _libc.madvise(self._address(slot), self.slot_bytes, advice)

    def map_memory(self, slot: int) -> None:
        self._map_slot(slot, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def prefer_large_pages(self, slot: int) -> None:
        """Have the kernel move a slot of memory to large pages when it has time: a sequence in a
        large replay is cold, and looking up each small page takes as long as copying it.

        Not while it is written, nor at once: the kernel would clear or copy megabytes inside of an
        insert, which takes four times as long then.
        """
        _libc.madvise(self._address(slot), self.slot_bytes, _MADV_HUGEPAGE)

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

    def bytes(self, slot: int) -> NDArray[np.uint8]:
        """A mapped slot as it is in its file."""
        buffer: Any = (ctypes.c_char * self.slot_bytes).from_address(self._address(slot))
        return np.ndarray((self.slot_bytes,), np.uint8, buffer)

    def sync(self, slot: int) -> None:
        """Write the slot's dirty pages to its file; a slot that is unmapped has none."""
        if _libc.msync(self._address(slot), self.slot_bytes, _MS_SYNC):
            error = ctypes.get_errno()
            if error != errno.ENOMEM:
                raise StorageFullError(
                    f"The replay's steps could not be written to disk ({os.strerror(error)}): "
                    "check the disk; a checkpoint taken now would not survive a power failure."
                )

    def populate(self, ranges: list[tuple[int, int, int]]) -> None:
        """Have the pages under these bytes (slot, start, end) ready for writing, where possible."""
        words = []
        for slot, start, end in ranges[:_MAX_RANGES]:
            first = start // _PAGE * _PAGE
            words += [self._address(slot) + first, end - first]
        if not self._populate_at_once(words):
            for address, size in zip(words[::2], words[1::2], strict=True):
                _libc.madvise(address, size, _MADV_POPULATE_WRITE)

    def _populate_at_once(self, words: list[int]) -> bool:
        """One system call for everything, which Linux allows on oneself since 6.13.

        A call for each range would have to wait for Python's lock in between, and fall behind.
        Pages of a file are first brought into the kernel's cache, which for many at once takes half
        as long as a fault for each; what is not mapped in time then only has a cheap fault to go.
        """
        vector = (ctypes.c_size_t * len(words))(*words)
        try:
            fd = os.pidfd_open(os.getpid())
        except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
            return False
        try:
            for advice in (_MADV_WILLNEED, _MADV_POPULATE_WRITE):
                done: int = _libc.syscall(
                    _SYS_PROCESS_MADVISE, fd, vector, len(words) // 2, advice, 0
                )
        finally:
            os.close(fd)
        return done >= 0

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
