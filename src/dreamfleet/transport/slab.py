"""Large arrays in memory that two processes of one machine share.

A sender owns a `Slab`: a memory file without a name, cut into slots of one size. It copies what is
large about a message into a free slot and sends the slot's number. The receiver has mapped the
memory once, read-only, and its arrays are views of the slot. So the pages are used again and again:
fresh ones, as a socket or a file for every message needs them, cost five times as much as the copy.

A slot has two owners. The first page of the memory holds a byte for each slot, which the sender
sets before it sends and the receiver clears when its last view is gone. The sender holds a slot of
its own accord while it may have to send the message again. No sender waits for a slot: if none is
free, bytes travel in packets.

The kernel frees the memory with the last process that has mapped it, however these end. Every
connection has slabs of its own, so a receiver that was killed in the middle of a view keeps no slot
of its successor's. The memory is sealed against shrinking, and reserved before it is written, so
that neither side can be killed by an access to memory that is not there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport.codec import Buffer
from dreamfleet.transport.errors import MessageError

SHARED_FROM = 4096  # bytes of a frame; smaller ones stay in the packet
LEAST_SHARED = 1 << 15  # bytes of all these frames; fewer cost less in the packet
MAX_SLOTS = 64
MAX_SLAB = 1 << 28  # bytes of a slab, of which only the slots that were used are reserved
MAX_RESERVED = 1 << 30  # bytes that a process has reserved in all its slabs

_PAGE = mmap.PAGESIZE
_ALIGN = 64
_BUSY, _FREE = 1, 0
_LONG = 1 << 20  # bytes whose copy lets other threads run


def aligned_total(sizes: Sequence[int]) -> int:
    """Bytes that frames of these sizes take in a slot."""
    return sum(size + -size % _ALIGN for size in sizes)


def _slots(slot_bytes: int) -> int:
    return min(MAX_SLOTS, MAX_SLAB // slot_bytes)


class Slab:
    """The sender's side. Touched by one thread at a time; views of it end on any thread.

    Args:
        frame_bytes: The least that a slot has to hold.

    Raises:
        OSError: This system has no such memory, or denies it, or nothing so large.
    """

    def __init__(self, frame_bytes: int) -> None:
        self.slot_bytes = max(_PAGE, 1 << (frame_bytes - 1).bit_length())
        slots = _slots(self.slot_bytes)
        if slots < 2 or not hasattr(os, "memfd_create"):
            raise OSError("Shared memory is not available, or too small.")
        self.descriptor = os.memfd_create("dreamfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._sizes = [0] * slots  # bytes that are reserved, by slot
        self._held = bytearray(slots)
        self._release = [_Release(self._held, slot) for slot in range(slots)]
        self._arrays: list[weakref.ref[NDArray[np.uint8]] | None] = [None] * slots
        self._filled = -1  # the slot that was filled last, until it is sent
        try:
            os.ftruncate(self.descriptor, _PAGE + slots * self.slot_bytes)
            os.posix_fallocate(self.descriptor, 0, _PAGE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.descriptor, 0)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, _give_back, self.descriptor, self._sizes).atexit = False

    def fill(self, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Copies of frames in a slot of their own, which is held until they are gone; None if none
        is free."""
        sizes = [len(frame) for frame in frames]
        total = aligned_total(sizes)
        slot = self._free_slot()
        if slot < 0 or total > self.slot_bytes or not self._reserve(slot, total):
            return None
        start = _PAGE + slot * self.slot_bytes
        array = np.ndarray((total,), np.uint8, self._memory, start)
        self._held[slot] = _BUSY
        self._arrays[slot] = weakref.ref(array, self._release[slot])
        self._filled = slot
        view, copies, place = array.data, list[Buffer](), 0
        for frame, size in zip(frames, sizes, strict=True):
            copy = view[place : place + size]
            if size < _LONG:
                copy[:] = frame
            else:
                np.copyto(array[place : place + size], np.frombuffer(frame, np.uint8))
            copies.append(copy)
            place += size + -size % _ALIGN
        return copies

    def send(self) -> int:
        """The slot that was filled last, which belongs to the receiver from now on as well."""
        slot, self._filled = self._filled, -1
        self._memory[slot] = _BUSY
        return slot

    def is_own(self, frame: Buffer) -> bool:
        """Whether `fill` made this frame last, and it was not sent."""
        if self._filled < 0 or not isinstance(frame, memoryview):
            return False
        array, memory = self._arrays[self._filled], cast(object, frame.obj)
        return array is not None and memory is array()

    def _free_slot(self) -> int:
        slot, slots = -1, len(self._held)
        while True:
            slot = self._memory.find(b"\0", slot + 1, slots)
            if slot < 0 or not self._held[slot]:
                return slot

    def _reserve(self, slot: int, count: int) -> bool:
        more = count + -count % _PAGE - self._sizes[slot]
        if more <= 0:
            return True
        if not _count_reserved(more):
            return False
        try:
            os.posix_fallocate(
                self.descriptor, _PAGE + slot * self.slot_bytes, self._sizes[slot] + more
            )
        except OSError:
            _count_reserved(-more)
            return False
        self._sizes[slot] += more
        return True


class _Release:
    """Called when the last view of a slot has gone."""

    __slots__ = ("_owners", "_slot")

    def __init__(self, owners: bytearray | mmap.mmap, slot: int) -> None:
        self._owners, self._slot = owners, slot

    def __call__(self, _: object) -> None:
        self._owners[self._slot] = _FREE


_reserved = 0  # bytes, in all slabs of this process
_reserving = threading.Lock()


def _count_reserved(more: int) -> bool:
    """Count bytes that are reserved, or given back; False if they are too many."""
    global _reserved
    with _reserving:
        if _reserved + more > MAX_RESERVED:
            return False
        _reserved += more
        return True


_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


def _give_back(descriptor: int, sizes: list[int]) -> None:
    os.close(descriptor)
    _count_reserved(-sum(sizes))


class SlabView:
    """The receiver's side.

    Args:
        descriptor: The sender's memory. It stays the caller's.
        slot_bytes: The size of a slot.

    Raises:
        MessageError: It is not memory that a `Slab` makes.
        OSError: It cannot be mapped.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self._slots = _slots(slot_bytes) if 0 < slot_bytes <= MAX_SLAB else 0
        self._slot_bytes = slot_bytes
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = _PAGE + self._slots * slot_bytes
        if not self._slots or seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != size:
            raise MessageError("Shared memory has another size than it should, or may shrink.")
        self._owners = mmap.mmap(descriptor, _PAGE)
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._release = [_Release(self._owners, slot) for slot in range(self._slots)]
        self._arrays: list[weakref.ref[NDArray[np.uint8]] | None] = [None] * self._slots

    def frames(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """Views of the frames in a slot, which is free again when they are gone.

        Raises:
            MessageError: They are not inside the slot.
        """
        total = aligned_total(sizes)
        if not 0 <= slot < self._slots or total > self._slot_bytes:
            raise MessageError("A message refers to memory outside of a slot.")
        array = np.ndarray((total,), np.uint8, self._memory, _PAGE + slot * self._slot_bytes)
        self._arrays[slot] = weakref.ref(array, self._release[slot])
        view, frames, place = array.data, list[memoryview](), 0
        for size in sizes:
            frames.append(view[place : place + size])
            place += size + -size % _ALIGN
        return frames
