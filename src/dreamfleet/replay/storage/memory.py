"""Memory: chunks at chosen addresses, pages ready before they are written, reused buffers.

Three mechanisms, each here because of a measured gain (`make bench ARGS=replay` and runs of it
with the other choice):

* `Arena` makes a column of all chunks one strided array, so a batch for sixteen streams is one
  write a column. Writing rows with `pwritev` instead of through the mapping was slower: 45,000
  against 63,000 image steps a second. Without read-ahead into the chunk that is being written, the
  kernel does not clear megabytes for the first step of each column.
* `Prefault` asks for pages ahead of the writers, in one call for all streams. With a core for its
  thread, 115,000 images a second were inserted instead of 57,000.
* `BufferPool` lends out aligned buffers that were used before. Copies into them run twice as fast
  as into new arrays from numpy.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from queue import SimpleQueue
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
_MADV_POPULATE_WRITE = 23
_SYS_PROCESS_MADVISE = 440
_MAX_RANGES = 1024
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
        _libc.madvise(self._address(slot), self.slot_bytes, advice)

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
        """One system call for everything, which Linux allows a process on itself since 6.13.

        A call for each range would wait for Python's lock in between, and fall behind. Pages of a
        file are first brought into the kernel's cache, which for many at once takes half as long as
        a fault for each; a page that is not mapped in time then only costs a cheap fault.
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


_AHEAD = 64
"""Steps asked for at a time, when the same number is still left."""
_LEAST_BYTES_AHEAD = 8192

_Jobs = SimpleQueue[list[tuple[int, int, int]] | None]


class Prefault:
    """A thread that asks the kernel for the pages that streams will write next.

    The first write to a page of a new chunk costs a fault, which takes longer than copying the
    step. The thread stays a few dozen steps ahead, so hardly any memory is taken early, and its
    call does not hold Python's lock. A page that is not ready in time faults as usual. There is one
    thread an arena, started with the first chunk; it ends with the arena.
    """

    def __init__(self, arena: Arena, columns: Iterable[tuple[int, int]], steps: int) -> None:
        """`columns`: where each column starts in a slot, and the bytes of a step in it."""
        self._columns = [(at, row) for at, row in columns if row * _AHEAD >= _LEAST_BYTES_AHEAD]
        self._steps = steps
        self._arena = weakref.ref(arena)
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(arena, self._jobs.put, None)

    def written(self, slots: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """Rows were written there; where that begins another stretch, ask for the one after."""
        due = indices % _AHEAD == 0
        if not self._columns or not due.any():
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._arena), name="replay-prefault", daemon=True
            )
            self._thread.start()
        ranges = []
        for slot, index in zip(slots[due].tolist(), indices[due].tolist(), strict=True):
            first = index + _AHEAD if index else 0
            last = min(index + 2 * _AHEAD, self._steps)
            if first < last:
                ranges += [(slot, at + first * row, at + last * row) for at, row in self._columns]
        self._jobs.put(ranges)

    def stop(self) -> None:
        """End the thread; called before the arena is unmapped."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()


def _work(jobs: _Jobs, find: weakref.ref[Arena]) -> None:
    while (job := jobs.get()) is not None:
        arena = find()
        if arena is None:
            return
        arena.populate(job)
        # Not kept while waiting for the next job: the arena may go away meanwhile.
        del arena


_SMALL = 64 << 10
# Copies into a buffer that numpy aligns (to 16 bytes) run at half the speed of the same copies
# into one aligned to a cache line, and a little slower when source and target lie at the same
# place in their pages. Rows in chunks tend to start at 0 or 2048, so targets start in between.
_PLACE_IN_PAGE = 1024
_BUFFER_PAGE = 4096
_BUFFERS_PER_SIZE = 8
_SIZES = 32

_Buffers = list[NDArray[np.uint8]]


def _references(buffers: _Buffers, which: int) -> int:
    return sys.getrefcount(buffers[which])


# What the count is when only the list holds the buffer; it differs between versions of Python.
_ONLY_THE_LIST = _references([np.empty(1, np.uint8)], 0)


class BufferPool:
    """A few buffers for each of the sizes that were asked for last.

    A new batch of images costs more time in page faults than in copying. The pool keeps a reference
    to each buffer and lends out views. A view keeps its buffer alive, so a buffer whose only
    reference is the pool's own is free, and nothing has to be given back.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffers] = {}
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array that is held nowhere else."""
        size = dtype.itemsize * math.prod(shape)
        if size < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            owner = self._find(size)
            start = (_PLACE_IN_PAGE - owner.ctypes.data) % _BUFFER_PAGE
            # Views of views refer to the array that owns the memory, so it is the one to watch.
            return owner[start : start + size].view(dtype).reshape(shape)

    def _find(self, size: int) -> NDArray[np.uint8]:
        # Taken out and put in again: the size that was not asked for longest comes first.
        buffers = self._buffers[size] = self._buffers.pop(size, [])
        if len(self._buffers) > _SIZES:
            del self._buffers[next(iter(self._buffers))]
        for which in range(len(buffers)):
            if _references(buffers, which) == _ONLY_THE_LIST:
                return buffers[which]
        buffer = np.empty(size + _BUFFER_PAGE, np.uint8)
        if len(buffers) < _BUFFERS_PER_SIZE:
            buffers.append(buffer)
        return buffer
