"""Steps in chunks: making chunks, writing rows, copying sequences out, writing values back.

The store knows slots and indices, not streams or items. It does no locking; `Replay` does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import ReplayError, StorageFullError
from dreamfleet.replay.schema import STEPID, STEPID_BYTES, Schema, StreamId
from dreamfleet.replay.storage.files import (
    BEFORE_BYTES,
    SUFFIX,
    UNUSED_BYTES,
    ChunkInfo,
    chunk_bytes,
    create_chunk,
    header_bytes,
)
from dreamfleet.replay.storage.memory import Arena, BufferPool, Prefault

Ints = NDArray[np.int64]

# Below the kernel's default limit of 65,530 mappings a process, with room for other mappings.
MAX_SLOTS = 60_000
_MAX_ADDRESSES = 1 << 45
_NONE = -1
_PAGE = 4096


class Piece(NamedTuple):
    """A run of steps inside one chunk, and the place in a batch that it fills."""

    row: int
    at: int
    slot: int
    start: int
    size: int


class Store:
    """Chunks of `steps` steps in the slots of an arena, on disk or in memory."""

    def __init__(
        self, schema: Schema, steps: int, slots: int, directory: Path | None, run: bytes
    ) -> None:
        self.schema = schema
        self.steps = steps
        self.directory = directory
        self.run = run
        self.chunk_bytes = chunk_bytes(schema, steps)
        self.slots = max(1, min(slots, MAX_SLOTS, _MAX_ADDRESSES // self.chunk_bytes))
        self.arena = Arena(self.chunk_bytes, self.slots)
        base = header_bytes(schema)
        starts, _ = schema.offsets(steps)
        self.ticks = self.arena.column(base, np.dtype(np.int64), steps)
        self.columns = {
            column.name: self.arena.column(
                base + starts[column.name], column.dtype, steps, column.shape
            )
            for column in schema.columns
        }
        self.before = self.arena.column(
            base - UNUSED_BYTES - BEFORE_BYTES, np.dtype(np.uint64), BEFORE_BYTES // 8
        )
        """Of each chunk, what the episode under way scored before it; see `Scores`."""
        # Where each column starts in a slot, and the bytes of a step in it.
        self.places = tuple((base + starts[c.name], c.row_bytes) for c in schema.columns)
        self._bytes = self.arena.column(0, np.dtype(np.uint8), self.chunk_bytes).reshape(-1)
        self._prefault = Prefault(self.arena, self.places, steps)
        self.ids = np.zeros((self.slots, 16), np.uint8)
        self.next = np.full(self.slots, _NONE, np.int64)
        self.previous = np.full(self.slots, _NONE, np.int64)
        self.lengths = np.zeros(self.slots, np.int64)
        self.own = np.zeros(self.slots, bool)
        """Whether a chunk holds steps of this run, not of another that were copied."""
        self.slot_of: dict[bytes, int] = {}
        self.changed: set[int] = set()
        """Slots with rows that were written, marked or erased since the last sync."""
        self._free = list(range(self.slots - 1, -1, -1))
        self._index_bytes = np.arange(steps, dtype=">u4").view(np.uint8).reshape(steps, 4)
        self._buffers = BufferPool()

    @property
    def chunks(self) -> int:
        return len(self.slot_of)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def index_bytes(self) -> int:
        """Memory used in addition to the steps themselves."""
        return int(self.ids.nbytes + 3 * self.next.nbytes)

    def create(self, stream: StreamId | None, previous: int) -> int:
        """A new, empty chunk; where there is no room, `StorageFullError` and nothing changes."""
        before = self.ids[previous].tobytes() if previous >= 0 else None
        chunk = uuid.uuid4().bytes
        slot = self._make(ChunkInfo(chunk, self.run, before, stream, self.steps, self.schema))
        if self.directory is not None:
            # A chunk that is being written has nothing to read: the kernel would clear megabytes
            # for the first step of each column. Once it is full, sequences are read from it.
            self.arena.read_ahead(slot, False)
            if previous >= 0:
                self.arena.read_ahead(previous, True)
        elif previous >= 0:
            self.arena.prefer_large_pages(previous)
        return slot

    def attach(self, path: Path, info: ChunkInfo) -> int:
        """Map a chunk file that exists. Raises `OSError`."""
        if not self._free:
            raise StorageFullError(
                f"there are more than {self.slots:,} chunks, and no more can be mapped"
            )
        slot = self._free[-1]
        self._map(slot, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._occupy(slot, info)
        return slot

    def copy(self, path: Path, info: ChunkInfo, first: int, stop: int) -> int:
        """Rows of another run's file in a chunk of the same id, which is made unless it is here;
        still without ticks."""
        before = info.previous if info.previous in self.slot_of else None
        mine = ChunkInfo(info.id, self.run, before, None, self.steps, self.schema)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            here = self.slot_of.get(info.id)
            slot = self._make(mine) if here is None else here
            self.changed.add(slot)
            try:
                self._read_rows(fd, slot, first, stop, path)
            except BaseException:
                if here is None:
                    self.release([slot])
                raise
        finally:
            os.close(fd)
        return slot

    def release(self, slots: Iterable[int]) -> None:
        """Remove chunks and their files."""
        for slot in slots:
            chunk = self.ids[slot].tobytes()
            if self.directory is not None:
                # Unlinked before it is unmapped, so that the kernel does not write it back first.
                path = self.directory / f"{chunk.hex()}{SUFFIX}"
                path.unlink(missing_ok=True)
            self.arena.unmap(slot)
            del self.slot_of[chunk]
            if self.next[slot] >= 0:
                self.previous[self.next[slot]] = _NONE
            if self.previous[slot] >= 0:
                self.next[self.previous[slot]] = _NONE
            self.next[slot] = self.previous[slot] = _NONE
            self.lengths[slot] = 0
            self.ids[slot] = 0
            self._free.append(slot)

    def link(self, before: int, after: int) -> None:
        """`after` continues the steps of `before`."""
        self.next[before], self.previous[after] = after, before

    def following(self, slot: int) -> Iterator[int]:
        """This slot and those that continue it; nothing for -1."""
        while slot >= 0:
            yield slot
            slot = int(self.next[slot])

    def preceding(self, slot: int) -> Iterator[int]:
        """This slot and those that it continues, backwards; nothing for -1."""
        while slot >= 0:
            yield slot
            slot = int(self.previous[slot])

    def span(self, slot: int, index: int, before: int, after: int) -> Ints:
        """Flat positions (`slot * steps + index`) from `before` steps earlier to `after` later,
        both included, as far as the chain reaches."""
        while before > index and self.previous[slot] >= 0:
            slot = int(self.previous[slot])
            index += self.steps
        first = max(0, index - before)
        last = index + after
        parts = []
        while slot >= 0 and last >= 0:
            stop = min(last + 1, int(self.lengths[slot]))
            parts.append(slot * self.steps + np.arange(first, stop))
            slot, first, last = int(self.next[slot]), 0, last - self.steps
        return np.concatenate(parts)

    def walk(self, slots: Ints, offsets: Ints) -> tuple[Ints, Ints]:
        """The slot and index that lie `offsets` steps after the start of `slots`."""
        if not (offsets >= self.steps).any():
            return slots, offsets
        hops = offsets // self.steps
        far = np.flatnonzero(hops)
        # Each chain of chunks is followed once, however many of the offsets lie along it.
        origins, which = np.unique(slots.reshape(-1)[far], return_inverse=True)
        distance = hops.reshape(-1)[far]
        longest = np.zeros(len(origins), np.int64)
        np.maximum.at(longest, which, distance)
        path = []
        for slot, count in zip(origins.tolist(), longest.tolist(), strict=True):
            for _ in range(count):
                slot = int(self.next[slot])
                path.append(slot)
        ends = np.cumsum(longest)
        slots = slots.copy()
        slots.reshape(-1)[far] = np.array(path)[(ends - longest)[which] + distance - 1]
        return slots, offsets - hops * self.steps

    def write(
        self, slots: Ints, indices: Ints, arrays: Mapping[str, NDArray[Any]], first_tick: int
    ) -> None:
        """Write one row each; they count once their ticks are committed."""
        for name, column in self.columns.items():
            column[slots, indices] = arrays[name]
        self.ticks[slots, indices] = np.arange(first_tick, first_tick + len(slots))
        self.changed.update(slots.tolist())
        self._prefault.written(slots, indices)

    def erase(self, slots: Ints, indices: Ints) -> None:
        """Make rows that were written but not committed unreadable for good."""
        self.ticks[slots, indices] = 0
        self.changed.update(slots.tolist())

    def pieces(self, slots: Ints, indices: Ints, length: int) -> list[Piece]:
        """Cut sequences that start at these steps where they cross from chunk to chunk."""
        result = []
        for row, (slot, index) in enumerate(zip(slots.tolist(), indices.tolist(), strict=True)):
            at = 0
            while True:
                count = min(length - at, self.steps - index)
                result.append(Piece(row, at, slot, index, count))
                at += count
                if at == length:
                    break
                slot, index = int(self.next[slot]), 0
        return result

    def gather(self, pieces: list[Piece], batch: int, length: int) -> dict[str, NDArray[Any]]:
        """Copy sequences out, each column into one contiguous array `[batch, length, ...]`."""
        self._touch(pieces, length)
        result = {}
        for column in self.schema.columns:
            source = self.columns[column.name]
            out = self._buffers.take((batch, length, *column.shape), column.dtype)
            for row, at, slot, index, count in pieces:
                out[row, at : at + count] = source[slot, index : index + count]
            result[column.name] = out
        stepid = np.empty((batch, length, STEPID_BYTES), np.uint8)
        for row, at, slot, index, count in pieces:
            part = stepid[row, at : at + count]
            part[:, :16] = self.ids[slot]
            part[:, 16:] = self._index_bytes[index : index + count]
        result[STEPID] = stepid
        return result

    def _touch(self, pieces: list[Piece], length: int) -> None:
        """Read a byte of every page of the sequences that lie in one chunk.

        Sequences in a large replay are cold. When all their pages are asked for at once, the
        CPU looks them up in parallel instead of one after the other while it copies: cold
        samples are 10 % faster.
        """
        whole = [(slot, start) for _, _, slot, start, size in pieces if size == length]
        if whole:
            places = np.array(whole)
            offsets, row_bytes = _pages(self.places, length)
            at = places[:, 1:] * row_bytes
            at += offsets
            at += places[:, :1] * self.chunk_bytes
            self._bytes[at]

    def locate(self, stepid: NDArray[np.uint8]) -> list[Piece]:
        """The runs of consecutive steps that stepids `[n, 20]` name; those that are not stored any
        more have a slot of -1."""
        if not len(stepid):
            return []
        flat = np.ascontiguousarray(stepid)
        chunk = flat[:, :16].copy().view(np.uint64)
        index = flat[:, 16:].copy().view(">u4")[:, 0].astype(np.int64)
        new = np.ones(len(flat), bool)
        new[1:] = (chunk[1:] != chunk[:-1]).any(1) | (index[1:] != index[:-1] + 1)
        starts = np.flatnonzero(new)
        ends = np.append(starts[1:], len(flat))
        runs = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            slot = self.slot_of.get(chunk[start].tobytes(), _NONE)
            first, count = int(index[start]), end - start
            if slot >= 0 and first + count > self.lengths[slot]:
                slot = _NONE
            runs.append(Piece(0, start, slot, first, count))
        return runs

    def scatter(self, runs: list[Piece], values: Mapping[str, NDArray[Any]]) -> None:
        """Write values `[n, ...]` back to the runs that are still here."""
        for name, array in values.items():
            column = self.columns[name]
            for _, at, slot, index, count in runs:
                if slot >= 0:
                    column[slot, index : index + count] = array[at : at + count]

    def take_changed(self, everything: bool) -> list[int]:
        """The slots to sync: those with changed rows, or all, also with values written back."""
        slots = list(self.slot_of.values() if everything else self.changed)
        self.changed = set()
        return slots

    def sync(self, slots: Iterable[int]) -> None:
        """Write the dirty pages of slots to the disk; one that was removed meanwhile has none."""
        for slot in slots:
            self.arena.sync(slot)

    def close(self) -> None:
        """Unmap everything; the arrays must not be touched afterwards, so they go first."""
        self.columns, self.ticks = {}, np.zeros((0, 0), np.int64)
        self.before = np.zeros((0, 0), np.uint64)
        self._bytes = np.zeros(0, np.uint8)
        self._prefault.stop()
        self.arena.close()

    def _make(self, info: ChunkInfo) -> int:
        slot = self._free[-1]
        if self.directory is None:
            self.arena.map_memory(slot)
        else:
            fd = create_chunk(self.directory, info)
            try:
                self._map(slot, fd)
            except BaseException:
                (self.directory / info.filename).unlink(missing_ok=True)
                raise
        self._occupy(slot, info)
        return slot

    def _read_rows(self, fd: int, slot: int, first: int, stop: int, path: Path) -> None:
        chunk = self.arena.bytes(slot)
        for start, row in self.places:
            at, end = start + first * row, start + stop * row
            while at < end:
                count = os.preadv(fd, [chunk[at:end].data], at)
                if count == 0:
                    raise ReplayError(f"{path} became shorter while it was read: load it again.")
                at += count

    def _map(self, slot: int, fd: int) -> None:
        try:
            self.arena.map_file(slot, fd)
        finally:
            os.close(fd)

    def _occupy(self, slot: int, info: ChunkInfo) -> None:
        assert self._free.pop() == slot
        self.ids[slot] = np.frombuffer(info.id, np.uint8)
        self.own[slot] = info.stream is not None
        self.slot_of[info.id] = slot


@lru_cache(maxsize=16)
def _pages(places: tuple[tuple[int, int], ...], length: int) -> tuple[Ints, Ints]:
    """A byte in each page of a sequence that starts with a chunk, and by how many bytes it is
    further back for each step that the sequence starts later."""
    bytes_in = [(start + np.arange(0, length * row, _PAGE), row) for start, row in places]
    return (
        np.concatenate([offsets for offsets, _ in bytes_in]),
        np.concatenate([np.full(len(offsets), row) for offsets, row in bytes_in]),
    )
