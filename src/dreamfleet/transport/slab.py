"""Large arrays in memory that two processes of one machine share.

A sender owns a `Slab`: a memory file without a name, cut into slots of one size. Its arrays are
made in a free slot (`shared_arrays`), or copied there, and the message names the slot. The receiver
has mapped the memory once, read-only, and its arrays are views of the slot. So the pages are used
again and again: fresh ones, as a socket or a file for every message needs them, cost five times as
much as a copy.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.transport.codec import SMALL, Block, Buffer
from dreamfleet.transport.errors import MessageError

LEAST_SHARED = 1 << 15  # bytes of all these frames; fewer cost less in the packet
MAX_SLOTS = 64
MAX_SLAB = 1 << 28  # bytes of a slab, of which only the slots that were used are reserved
MAX_RESERVED = 1 << 30  # bytes that a process has reserved in all its slabs

_PAGE = mmap.PAGESIZE
_ALIGN = 64
_BUSY, _FREE = 1, 0
_LONG = 1 << 20  # bytes whose copy lets other threads run


Memory = NDArray[np.uint8]
Allocate = Callable[[int], Memory | None]
"""Memory of so many bytes, None if there is none."""


def shared_arrays(
    allocate: Allocate, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
) -> dict[str, NDArray[Any]]:
    """Arrays without a content. The large ones lie in memory that is sent without a copy, if there
    is some; they must not be changed after they were sent."""
    sizes = {key: dtype.itemsize * prod(shape) for key, (shape, dtype) in shapes.items()}
    large = [size for size in sizes.values() if size > SMALL]  # the others are no frames
    memory = allocate(aligned_total(large)) if large else None
    pieces = iter(_cut(memory, large) if memory is not None else ())
    arrays = {}
    for key, (shape, dtype) in shapes.items():
        if memory is None or sizes[key] <= SMALL:
            arrays[key] = np.empty(shape, dtype)
        else:
            arrays[key] = np.ndarray(shape, dtype, next(pieces))
    return arrays


def renew(block: Block, allocate: Allocate, keep: Iterable[str]) -> None:
    """Let the large arrays of a block lie in memory that is sent without a copy, if there is some.
    Only those that `keep` names have their content afterwards."""
    if block.frame_bytes < LEAST_SHARED:
        return
    sizes = list(map(len, block.frames))
    memory = allocate(aligned_total(sizes))
    kept = {key: block[key] for key in keep}
    if memory is None:  # the receiver may still use what was sent before
        block.move()
    else:
        block.move(_cut(memory, sizes))
    for key, array in kept.items():
        if block[key] is not array:
            block[key][:] = array


def _cut(memory: Memory, sizes: Iterable[int]) -> list[memoryview]:
    """Pieces of these sizes, one behind the other."""
    view, place, pieces = memory.data, 0, list[memoryview]()
    for size in sizes:
        pieces.append(view[place : place + size])
        place += size + -size % _ALIGN
    return pieces


def aligned_total(sizes: Iterable[int]) -> int:
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
        self._arrays: list[weakref.ref[Memory] | None] = [None] * slots
        try:
            os.ftruncate(self.descriptor, _PAGE + slots * self.slot_bytes)
            os.posix_fallocate(self.descriptor, 0, _PAGE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.descriptor, 0)
            self._begin = _address(self._memory) + _PAGE
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, _give_back, self.descriptor, self._sizes).atexit = False

    def allocate(self, size: int) -> Memory | None:
        """Memory in a slot of its own, which is held until it is gone; None if none is free."""
        slot = self._free_slot()
        if slot < 0 or size > self.slot_bytes or not self._reserve(slot, size):
            return None
        array = np.ndarray((size,), np.uint8, self._memory, _PAGE + slot * self.slot_bytes)
        self._held[slot] = _BUSY
        self._arrays[slot] = weakref.ref(array, partial(_release, self._held, slot))
        return array

    def fill(self, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Copies of frames in a slot of their own; None if none is free."""
        sizes = [len(frame) for frame in frames]
        array = self.allocate(aligned_total(sizes))
        if array is None:
            return None
        copies = _cut(array, sizes)
        for frame, copy in zip(frames, copies, strict=True):
            if len(frame) < _LONG:
                copy[:] = frame
            else:
                np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(frame, np.uint8))
        return list(copies)

    def find(self, frames: Sequence[Buffer]) -> tuple[int, list[int]]:
        """The slot in which frames lie, and where each begins in it, -1 for one that does not; a
        slot of -1 if there is none, or the receiver has it."""
        slot, places = -1, []
        for frame in frames:
            place = _address(frame) - self._begin if isinstance(frame, memoryview) else -1
            if slot < 0 and 0 <= place < len(self._held) * self.slot_bytes:
                slot = place // self.slot_bytes
            place -= slot * self.slot_bytes
            places.append(place if slot >= 0 and 0 <= place < self.slot_bytes else -1)
        return (slot, places) if slot >= 0 and not self._memory[slot] else (-1, [])

    def send(self, slot: int) -> None:
        """Let a slot belong to the receiver from now on as well."""
        self._memory[slot] = _BUSY

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


def _address(buffer: Buffer | mmap.mmap) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _release(owners: bytearray | mmap.mmap, slot: int, _view: object) -> None:
    """Called when the last view of a slot has gone."""
    owners[slot] = _FREE


_reserved = 0  # bytes, in all slabs of this process
_reserving = threading.RLock()  # also taken by the garbage collector, in any thread


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
        self._arrays: list[weakref.ref[Memory] | None] = [None] * self._slots

    def frames(self, slot: int, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Views of the frames with these places and sizes in a slot, which is free again when they
        are gone.

        Raises:
            MessageError: They are not inside the slot.
        """
        total = max(place + size for place, size in places)
        if not 0 <= slot < self._slots or total > self._slot_bytes:
            raise MessageError("A message refers to memory outside of a slot.")
        array = np.ndarray((total,), np.uint8, self._memory, _PAGE + slot * self._slot_bytes)
        self._arrays[slot] = weakref.ref(array, partial(_release, self._owners, slot))
        view = array.data
        return [view[place : place + size] for place, size in places]
