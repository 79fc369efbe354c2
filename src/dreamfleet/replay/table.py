"""Steps, chains and items of one schema, kept consistent with the journal.

The order of an append is what makes it safe to be killed anywhere: make the chunks, write the
rows, write their ticks, note the batch, commit. Only then are cursors and items moved in memory,
and only then does anything old leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.chains import Chains, Places
from dreamfleet.replay.chunkfile import StreamId
from dreamfleet.replay.errors import StorageFullError
from dreamfleet.replay.items import SLACK, Items
from dreamfleet.replay.journal import Journal, Source
from dreamfleet.replay.priorities import Priorities
from dreamfleet.replay.schema import Schema
from dreamfleet.replay.selectors import Selector
from dreamfleet.replay.store import MAX_SLOTS, Ints, Store

_SPARE_SLOTS = 4096
_LEAST_PATIENCE = 1024


class Table:
    """Everything about the stored steps; `Replay` adds locks, modes and statistics."""

    def __init__(
        self,
        schema: Schema,
        steps: int,
        *,
        length: int,
        capacity: int,
        max_bytes: int | None,
        directory: Path | None,
        journal: Journal,
        selector: Selector,
        before_release: Callable[[], None],
        found: int = 0,
    ) -> None:
        # A directory may hold more chunks than the capacity needs: it was larger, or had more
        # streams. They are all looked at before the oldest leave.
        slots = max(2 * -(-capacity // steps), found) + _SPARE_SLOTS
        self.store = Store(schema, steps, min(slots, MAX_SLOTS), directory, journal.id)
        self.chains = Chains(self.store, length)
        self.items = Items(capacity, steps)
        self.length = length
        self.max_bytes = max_bytes
        # How long a stream may pause, in steps of the others, before its last steps leave.
        self._patience = max(capacity, 4 * steps, _LEAST_PATIENCE)
        self._swept = 0
        self.journal = journal
        self._before_release = before_release
        selector.bind(capacity + SLACK)
        self.priorities = (
            Priorities(self.store, length, selector.prioritized) if selector.prioritized else None
        )

    @property
    def data_bytes(self) -> int:
        return self.store.chunks * self.store.chunk_bytes

    @property
    def index_bytes(self) -> int:
        """Memory used beside the steps themselves."""
        return (
            self.store.index_bytes
            + self.chains.index_bytes
            + self.items.index_bytes
            + (self.priorities.index_bytes(self.store.chunks) if self.priorities else 0)
        )

    @property
    def stored_steps(self) -> int:
        return int(self.store.lengths.sum())

    def append(
        self,
        arrays: Mapping[str, NDArray[Any]],
        streams: list[StreamId],
        source: Source | None,
        seq: int | None,
    ) -> None:
        """Add one step for each row, all of them or, when anything goes wrong, none."""
        chains, ranks = self.chains.lookup(streams)
        self.make_room(lambda gone: self.chains.chunks_needed(chains, ranks, gone))
        # Some of the streams may have lost their steps to make room, and start a chain anew.
        chains, ranks = self.chains.lookup(streams)
        places = self.chains.place(chains, ranks)
        last = self.journal.committed + len(streams)
        try:
            self.store.write(places.slots, places.indices, arrays, last - len(streams) + 1)
            if source is not None and seq is not None:
                self.journal.stage(source, seq, last)
            self.journal.commit(last)
        finally:
            # Also when interrupted: what is committed is taken in, what is not leaves no trace.
            if self.journal.committed == last:
                self._take_in(places, last)
            else:
                self.store.erase(places.slots, places.indices)
                self.journal.forget_uncommitted()
                self.store.release(slot for _, slot in places.links)

    def completed_at(self, number: int) -> int:
        """The tick of the step that completed a living item."""
        slot, index = self.items.starts(np.array([number]))
        slot, index = self.store.walk(slot, index + self.length - 1)
        return int(self.store.ticks[slot[0], index[0]])

    def items_until(self, tick: int) -> int:
        """Number of the first living item that was completed after `tick`."""
        numbers = range(self.items.low, self.items.high)
        return self.items.low + bisect_right(numbers, tick, key=self.completed_at)

    def take_in_chains(
        self,
        chains: Collection[tuple[list[int], StreamId | None]],
        grown: Mapping[int, list[int]] | None = None,
    ) -> None:
        """Number the items of chains found on disk, in the order they were completed.

        A chain is given as its slots, with the stream that will continue it, if any; one that was
        here already and has `grown` as its number, with the slots it got.
        """
        if self.priorities:
            for slots in [*(slots for slots, _ in chains), *(grown or {}).values()]:
                for slot in slots:
                    self.priorities.created(slot)
        parts = [self.chains.restore(chain, stream) for chain, stream in chains]
        parts += [self.chains.found(chain) for chain in grown or {}]
        if parts:
            starts = np.concatenate([start for start, _ in parts])
            order = np.argsort(np.concatenate([tick for _, tick in parts]), kind="stable")
            self._push(*np.divmod(starts[order], self.store.steps), np.zeros(0, np.int64))
            self._sweep(self._patience)
            self._shrink()

    def _take_in(self, places: Places, last: int) -> None:
        if self.priorities:
            for _, slot in places.links:
                self.priorities.created(slot)
        slots, indices, online = self.chains.advance(places, last)
        self._push(slots, indices, np.flatnonzero(online))

    def _push(self, slots: Ints, indices: Ints, online: Ints) -> None:
        for first in range(0, len(slots), SLACK):
            part = slice(first, first + SLACK)
            mine = online[(online >= first) & (online < first + SLACK)] - first
            if self.priorities:
                self.priorities.started(slots[part], indices[part], self.items.high)
            self.items.push(slots[part], indices[part], mine)
            self._evict(len(self.items) - self.items.capacity)

    def _evict(self, count: int) -> None:
        if count > 0:
            slots = self.items.pop(count)
            if slots:
                self._release(slots)
            if slots or self.journal.committed - self._swept >= self._patience:
                self._sweep(self._patience)

    def _sweep(self, patience: int) -> None:
        """Let chains go that hold nothing younger than the oldest item.

        Streams come to an end without saying so; their last steps would stay for ever.
        """
        self._swept = self.journal.committed
        if len(self.items):
            idle = self.chains.idle_since(self.completed_at(self.items.low), patience)
            if idle:
                self._release(idle)

    def _release(self, slots: list[int]) -> None:
        self._before_release()
        self.chains.forget(set(slots))
        self.store.release(slots)

    def make_room(self, needed: Callable[[NDArray[np.bool_] | None], int]) -> None:
        """Evict until the chunks needed fit, or refuse and evict nothing.

        `needed` is asked with the chains that would be gone: those start with a chunk of their own.
        """
        if (chunks := needed(None)) <= self._room():
            return
        pinned, gone = self.store.chunks, None
        if len(self.items):
            pinned, gone = self.chains.pinned(self.completed_at(self.items.high - 1))
        if needed(gone) > self._room() + self.store.chunks - pinned:
            raise StorageFullError(self._why_full(chunks, pinned))
        while needed(None) > self._room():
            self._sweep(patience=0)
            if needed(None) > self._room():
                self._evict_some()

    def _shrink(self) -> None:
        """Fit what was found on disk into less than it took; streams may lose their last steps."""
        while self._room() < 0:
            self._sweep(patience=0)
            if self._room() >= 0:
                return
            if len(self.items):
                self._evict_some()
            else:
                self._release(self.chains.oldest())

    def _evict_some(self) -> None:
        # Whichever comes first: a chunk without items, or a chain without any.
        ended = self.items_until(self.chains.oldest_end()) - self.items.low
        self._evict(min(self.items.until_chunk_end(), max(1, ended)))

    def _room(self) -> int:
        if self.max_bytes is None:
            return self.store.free_slots
        spare = (self.max_bytes - self.data_bytes) // self.store.chunk_bytes
        return min(self.store.free_slots, spare)

    def _why_full(self, chunks: int, pinned: int) -> str:
        if self.max_bytes is None:
            return (
                f"The replay has no place for {chunks} more chunks beside {pinned}: "
                f"raise `chunk` ({self.store.steps} steps) or lower the number of streams."
            )
        return (
            f"max_bytes={self.max_bytes:,} has no room for {chunks} more chunks of "
            f"{self.store.chunk_bytes:,} bytes beside the {pinned} that streams are "
            f"writing: raise max_bytes, or lower `chunk` ({self.store.steps} steps)."
        )
