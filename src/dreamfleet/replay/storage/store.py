"""Steps in chunks: making chunks, writing rows, copying sequences out, writing values back.

The store knows slots and indices, not streams or items. It does no locking; `Replay` does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.errors import StorageFullError
from dreamfleet.replay.schema import STEPID, STEPID_BYTES, Schema, StreamId, is_imported
from dreamfleet.replay.storage.files import (
    BEFORE_BYTES,
    SUFFIX,
    UNUSED_BYTES,
    ChunkInfo,
    chunk_bytes,
    create_chunk,
    header_bytes,
)
from dreamfleet.replay.storage.memory import Arena
from dreamfleet.transport import answer_memory, shared_arrays

Ints = NDArray[np.int64]

# Below the kernel's default limit of 65,530 mappings a process, with room for other parts.
MAX_SLOTS = 60_000
_MAX_ADDRESSES = 1 << 45
_NONE = -1
# Pages are asked for so many steps at a time, of columns that are so wide.
_AHEAD, _LEAST_BYTES_AHEAD = 16, 8192


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
        # Where the columns start that are worth asking for pages, and the bytes of a step.
        self._wide = [
            (base + starts[column.name], column.row_bytes)
            for column in schema.columns
            if column.row_bytes * _AHEAD >= _LEAST_BYTES_AHEAD
        ]
        self.ids = np.zeros((self.slots, 16), np.uint8)
        # With one place more, which a slot of -1 leads to: there is nothing behind a chain's end.
        self.next = np.full(self.slots + 1, _NONE, np.int64)
        self.previous = np.full(self.slots + 1, _NONE, np.int64)
        self.lengths = np.zeros(self.slots + 1, np.int64)
        self.own = np.zeros(self.slots, bool)
        """Whether a chunk holds steps of this run, not of another one."""
        self.slot_of: dict[bytes, int] = {}
        self.changed: set[int] = set()
        """Slots with rows that were written, marked or erased since the last sync."""
        self._free = list(range(self.slots - 1, -1, -1))
        self._index_words = np.arange(steps, dtype=">u4").view(np.uint32)

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
        """A new, empty chunk behind `previous`; where there is no room, `StorageFullError` and
        nothing changes."""
        before = self.ids[previous].tobytes() if previous >= 0 else None
        info = ChunkInfo(uuid.uuid4().bytes, self.run, before, stream, self.steps, self.schema)
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
            # A chunk that is being written has nothing to read: the kernel would clear megabytes
            # for the first step of each column. Once it is full, sequences are read from it.
            self.arena.read_ahead(slot, False)
        self._occupy(slot, info)
        if previous >= 0:
            self.link([previous, slot])
            if self.directory is not None:
                self.arena.read_ahead(previous, True)
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
            self.previous[self.next[slot]] = self.next[self.previous[slot]] = _NONE
            self.next[slot] = self.previous[slot] = _NONE
            self.lengths[slot] = self.ids[slot] = 0
            self._free.append(slot)

    def link(self, slots: Sequence[int]) -> None:
        """Let each of these slots continue the steps of the one before."""
        self.next[slots[:-1]], self.previous[slots[1:]] = slots[1:], slots[:-1]

    def preceding(self, slot: int) -> Iterator[int]:
        """This slot and those that it continues, backwards; nothing for -1."""
        while slot >= 0:
            yield slot
            slot = int(self.previous[slot])

    def walk(self, slots: Ints, offsets: Ints) -> tuple[Ints, Ints]:
        """The slot and index that lie `offsets` steps after the start of `slots`, or before it if
        they are negative; a slot of -1 where the chain does not reach."""
        while True:
            outside = offsets.view(np.uint64) >= self.steps  # as negative ones are, too
            if not outside.any():
                return slots, offsets
            back = offsets < 0
            beside = np.where(back, self.previous[slots], self.next[slots])
            slots = np.where(outside, beside, slots)
            offsets = offsets + np.where(outside, np.where(back, self.steps, -self.steps), 0)

    def write(
        self, slots: Ints, indices: Ints, arrays: Mapping[str, NDArray[Any]], first_tick: int
    ) -> None:
        """Write one row each; they count once their ticks are committed."""
        due = indices % _AHEAD == 0
        if self._wide and due.any():
            for slot, first in zip(slots[due].tolist(), indices[due].tolist(), strict=True):
                last = min(first + _AHEAD, self.steps)
                for at, row_bytes in self._wide:
                    self.arena.populate(slot, at + first * row_bytes, at + last * row_bytes)
        for name, column in self.columns.items():
            column[slots, indices] = arrays[name]
        self.ticks[slots, indices] = np.arange(first_tick, first_tick + len(slots))
        self.changed.update(slots.tolist())

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
        """Copy sequences out, each column into one contiguous array `[batch, length, ...]`. If this
        answers a call, they are copied to where they are sent from."""
        shapes = {c.name: ((batch, length, *c.shape), c.dtype) for c in self.schema.columns}
        shapes[STEPID] = (batch, length, STEPID_BYTES), np.dtype(np.uint8)
        result = shared_arrays(answer_memory, shapes)
        for name, source in self.columns.items():
            out = result[name]
            for row, at, slot, index, count in pieces:
                out[row, at : at + count] = source[slot, index : index + count]
        words, ids = result[STEPID].view(np.uint32), self.ids.view(np.uint32)
        for row, at, slot, index, count in pieces:
            words[row, at : at + count, :4] = ids[slot]
            words[row, at : at + count, 4] = self._index_words[index : index + count]
        return result

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
        self.arena.close()

    def _map(self, slot: int, fd: int) -> None:
        try:
            self.arena.map_file(slot, fd)
        finally:
            os.close(fd)

    def _occupy(self, slot: int, info: ChunkInfo) -> None:
        assert self._free.pop() == slot
        self.ids[slot] = np.frombuffer(info.id, np.uint8)
        self.own[slot] = not is_imported(info.stream)
        self.slot_of[info.id] = slot
