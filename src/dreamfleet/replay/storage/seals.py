"""Checksums of stored rows, so that a bit that has flipped on the disk is found and not trained on.

A chunk is cut into at most eight blocks of rows. A block is *sealed* when it is complete and there
is a row behind it, because until then its last row may still be marked as the end of an episode
that was cut short. The seals lie at the end of the chunk's header, where older versions left zeros:

    1 word           which columns they cover, a bit each; the last bit stands for all further ones
    1 word a block   CRC-32 of the block's rows, and a checksum of that number, of the columns, the
                     block and the chunk's id; anything else means that the block is not sealed

So a seal is there or not, wherever a process is killed, and a damaged one is none. Columns that
updates change, such as latent states, are not covered: the first update of one ends the seals that
cover it, and they are made again without it.

Blocks that were found on the disk are checked when they are first sampled; those that have no seal
yet, such as all of an older version's and all after a power cut, get one then. What this process
has written itself it does not check. Sealing is spread over the inserts, a block or two with each,
and whether there is something to seal is looked at after some of them: looking takes as long as it
does for one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32  # what zlib's returns, several times as fast

from dreamfleet.numbers import checksum
from dreamfleet.replay.storage.files import SEAL_BYTES, header_bytes
from dreamfleet.replay.storage.store import Ints, Piece, Store

BLOCKS = SEAL_BYTES // 8 - 1
_LAST_BIT = 63
_AT_LEAST, _SHARE = 1, 16
_LOOK = 32  # batches of rows


class Block(NamedTuple):
    """Rows of a chunk that share a checksum."""

    slot: int
    number: int


class Seals:
    """The checksums of a store's chunks in files.

    Calls are made with the replay's lock; `check` also without it, by those who copy rows out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows = -(-store.steps // BLOCKS)
        """Rows in a block."""
        self._last = -(-store.steps // self.rows) - 1
        self._place = header_bytes(store.schema) - SEAL_BYTES
        self._words = store.arena.column(self._place, np.dtype(np.uint64), 1 + BLOCKS)
        content = store.arena.column(0, np.dtype(np.uint8), store.chunk_bytes)
        self._content = content.reshape(-1).data  # whose slices are cheap
        self._bits = {
            column.name: 1 << min(number, _LAST_BIT)
            for number, column in enumerate(store.schema.columns)
        }
        self._covered = 0
        for bit in self._bits.values():
            self._covered |= bit
        # In memory, because looking for it in a large replay would read a page of the disk.
        self._columns = np.zeros(store.slots, np.uint64)
        self._unchecked = np.zeros((store.slots, BLOCKS), bool)
        self._written: list[tuple[Ints, Ints]] = []
        self._pending: deque[Block] = deque()

    def found(self, slots: Collection[int]) -> None:
        """Rows of these chunks were not written by this process, or not as steps."""
        for slot in slots:
            self._unchecked[slot] = True
            self._columns[slot] = self._words[slot, 0]
            if self._sealed(Block(slot, 0)):
                self._covered &= int(self._columns[slot])

    def forget(self, slots: Collection[int]) -> None:
        """Chunks are about to be removed."""
        self._look()
        gone = set(slots)
        self._unchecked[list(gone)] = False
        self._columns[list(gone)] = 0
        self._pending = deque(block for block in self._pending if block.slot not in gone)

    def written(self, slots: Ints, indices: Ints) -> None:
        """Rows were taken in; where one begins a block, the one before is sealed soon."""
        self._written.append((slots, indices))
        if len(self._written) == _LOOK:
            self._look()
        if self._pending:
            self._seal_some(_AT_LEAST + len(self._pending) // _SHARE)

    def finish(self) -> None:
        """Seal everything that is waiting for it."""
        self._look()
        self._seal_some(len(self._pending))

    def _look(self) -> None:
        """Find the blocks that were completed."""
        if not self._written:
            return
        slots, indices = (np.concatenate(parts) for parts in zip(*self._written, strict=True))
        self._written.clear()
        for at in np.flatnonzero(indices % self.rows == 0).tolist():
            slot, index = int(slots[at]), int(indices[at])
            if index:
                self._pending.append(Block(slot, index // self.rows - 1))
            elif (before := int(self._store.previous[slot])) >= 0:
                self._pending.append(Block(before, self._last))

    def unchecked(self, pieces: Collection[Piece]) -> list[Block]:
        """The blocks under these rows that nobody has checked yet."""
        if not self._unchecked[[piece.slot for piece in pieces]].any():
            return []
        blocks = {
            Block(slot, number)
            for _, _, slot, start, size in pieces
            for number in range(start // self.rows, (start + size - 1) // self.rows + 1)
        }
        return sorted(block for block in blocks if self._unchecked[block])

    def check(self, blocks: Iterable[Block]) -> list[Block]:
        """Compare blocks with their seals, and seal those that have none; returns damaged ones."""
        damaged = []
        for block in blocks:
            if not self._sealed(block):
                self._seal(block)
            elif self._crc(block, int(self._columns[block.slot])) != self._noted(block):
                damaged.append(block)
                continue
            self._unchecked[block] = False
        return damaged

    def end(self, block: Block) -> None:
        """A damaged block and those behind it are given up."""
        self._words[block.slot, 1 + block.number :] = 0

    def uncover(self, slots: Collection[int], names: Iterable[str]) -> list[Block]:
        """Columns are about to change in these chunks: end the seals that cover them.

        Returns damaged blocks among them; then nothing has been ended.
        """
        bits = 0
        for name in names:
            bits |= self._bits[name]
        self._covered &= ~bits
        which = [slot for slot in sorted(set(slots)) if int(self._columns[slot]) & bits]
        every = [Block(slot, number) for slot in which for number in range(BLOCKS)]
        # What is sealed again has to be what was written.
        if damaged := self.check(block for block in every if self._unchecked[block]):
            return damaged
        for slot in which:
            self._words[slot] = 0
            self._columns[slot] = 0
        self._pending.extend(every)
        return []

    def good_rows(self, path: Path, slot: int, rows: int) -> int:
        """How many of the first rows of a chunk, copied from another run's file, are undamaged.

        The file's seals are read after its rows were copied: if a seal covers a column then, no
        update had changed it before.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            words = np.frombuffer(os.pread(fd, SEAL_BYTES, self._place), np.uint64)
        finally:
            os.close(fd)
        for number in range(rows // self.rows if len(words) == 1 + BLOCKS else 0):
            block, covered, entry = Block(slot, number), int(words[0]), int(words[1 + number])
            crc = self._crc(block, covered)
            if entry != self._entry(block, covered, crc) and self._is_valid(block, covered, entry):
                return number * self.rows
        return rows

    def _seal_some(self, count: int) -> None:
        while count and self._pending:
            self._seal(self._pending.popleft())
            count -= 1

    def _seal(self, block: Block) -> None:
        """Seal a block, if it is complete and a row follows it."""
        store, slot = self._store, block.slot
        length, end = int(store.lengths[slot]), (block.number + 1) * self.rows
        if end < length or (length == store.steps <= end and store.next[slot] >= 0):
            covered = int(self._columns[slot])
            if not covered:
                self._columns[slot] = self._words[slot, 0] = covered = self._covered
            self._words[slot, 1 + block.number] = self._entry(
                block, covered, self._crc(block, covered)
            )

    def _sealed(self, block: Block) -> bool:
        entry = int(self._words[block.slot, 1 + block.number])
        return self._is_valid(block, int(self._columns[block.slot]), entry)

    def _is_valid(self, block: Block, covered: int, entry: int) -> bool:
        return entry != 0 and entry == self._entry(block, covered, entry & 0xFFFFFFFF)

    def _noted(self, block: Block) -> int:
        return int(self._words[block.slot, 1 + block.number]) & 0xFFFFFFFF

    def _entry(self, block: Block, covered: int, crc: int) -> int:
        first, second = self._store.ids[block.slot].view(np.uint64).tolist()
        # Of the upper half of the checksum every bit depends on all that goes into it.
        return checksum(first, second, covered, block.number, crc) >> 32 << 32 | crc

    def _crc(self, block: Block, covered: int) -> int:
        first = block.number * self.rows
        stop = min(first + self.rows, self._store.steps)
        slot, crc = block.slot * self._store.chunk_bytes, 0
        for bit, (start, row) in zip(self._bits.values(), self._store.places, strict=True):
            if covered & bit:
                at = slot + start
                crc = crc32(self._content[at + first * row : at + stop * row], crc)
        return crc
