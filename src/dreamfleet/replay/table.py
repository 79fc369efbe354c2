"""Where every step and every sequence is, kept consistent with the journal.

A chain is an unbroken run of a stream's steps, from chunk to chunk. Its head is the place of the
next step. All heads are arrays indexed by chain, so a batch is handled without a loop over its
rows. Chunks know the chunks before and after them (`Store.walk`); nothing else says where a row is.

An item is a sequence that can be sampled. It is numbered when its last step arrives, and items
leave from the old end, so the living ones are always one range of numbers `[low, high)`. Selectors
draw numbers; a ring maps a number to the step the item starts at, in eight bytes an item.

The order of an append is what makes it safe to be killed anywhere: make the chunks, write the
rows, write their ticks, note the batch, commit. Only then are heads and items moved in memory,
and only then does anything old leave.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.episodes import Finished, Ledger, Scores
from dreamfleet.replay.errors import StorageFullError
from dreamfleet.replay.schema import Schema, StreamId
from dreamfleet.replay.storage.journal import Journal, Source
from dreamfleet.replay.storage.store import MAX_SLOTS, Ints, Store

if TYPE_CHECKING:
    from dreamfleet.replay.selectors import Selector

SPARE_SLOTS = 4096
"""Chunks for which addresses are reserved in addition to twice those of the capacity."""
SLACK = 4096
"""Items that may be pushed before old ones have to leave."""
log = logging.getLogger(__name__)

_NONE = -1
_LEAST_PATIENCE = 1024


class _Places(NamedTuple):
    """Where the rows of a batch go."""

    chains: Ints
    ranks: Ints
    """How many earlier rows of the batch belong to the same chain."""
    slots: Ints
    indices: Ints
    made: list[int]
    """Slots of new chunks."""


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
        found: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        # A directory may hold more chunks than the capacity needs: it was larger, or had more
        # streams. They are all looked at before the oldest leave.
        slots = max(2 * -(-capacity // steps), found) + SPARE_SLOTS
        self.store = Store(schema, steps, min(slots, MAX_SLOTS), directory, journal.id)
        self.length, self.capacity, self.max_bytes = length, capacity, max_bytes
        if capacity > (most := self.store.slots * steps):
            log.warning(
                "The replay can hold about %s sequences in %s chunks, not its capacity of %s: "
                "lower it, or raise `chunk` (%d steps) where chunks are small.",
                *(f"{most:,}", f"{self.store.slots:,}", f"{capacity:,}", steps),
            )
        # How long a stream may pause, in steps of the others, before its last steps leave.
        self._patience = max(capacity, 4 * steps, _LEAST_PATIENCE)
        self._swept = 0
        self.scores = Scores(self.store)
        self.ledger = ledger
        self.journal = journal

        self.low = self.high = 0
        self.online: deque[int] = deque()
        """Items that no other one overlaps and that were not trained on yet, oldest first."""
        self._ring_size = capacity + SLACK
        # Zeroed pages of a large array take memory only once they are written.
        self._ring = np.zeros(self._ring_size, np.int64)

        self.streams: dict[StreamId, int] = {}
        """The chain that each stream continues."""
        self._names: list[StreamId | None] = []
        self._free: list[int] = []
        self._looked_up: tuple[list[StreamId], Ints, Ints] | None = None
        self.head_slot: Ints
        """Of each chain, the chunk that is written, or -1."""
        self._head_len: Ints
        """Steps in it."""
        self._pending: Ints
        """Steps of the chain that are part of its next item."""
        self._started: Ints
        """Items so far; every `length`-th of them is an online window."""
        self._last_tick: Ints
        """The tick of the newest step."""
        self._heads = np.zeros((5, 0), np.int64)
        self._allocate(16)

        selector.bind(self)
        self.priorities = selector.prioritized

    @property
    def items(self) -> int:
        """How many items can be sampled."""
        return self.high - self.low

    @property
    def data_bytes(self) -> int:
        return self.store.chunks * self.store.chunk_bytes

    @property
    def index_bytes(self) -> int:
        """Memory used in addition to the steps themselves."""
        ring = self._ring.itemsize * min(self.high, self._ring_size)
        priorities = self.priorities.index_bytes(self.store.chunks) if self.priorities else 0
        return self.store.index_bytes + self._heads.nbytes + ring + priorities

    @property
    def stored_steps(self) -> int:
        return int(self.store.lengths.sum())

    # --- adding steps ----------------------------------------------------------------------------

    def append(
        self,
        arrays: Mapping[str, NDArray[Any]],
        streams: list[StreamId],
        source: Source | None,
        seq: int | None,
    ) -> None:
        """Add one step for each row, all of them or, when anything goes wrong, none."""
        chains, ranks = self.lookup(streams)
        self._make_room(chains, ranks)
        # Some of the streams may have lost their steps to make room, and start a new chain.
        places = self._place(*self.lookup(streams))
        last = self.journal.committed + len(streams)
        try:
            self.store.write(places.slots, places.indices, arrays, last - len(streams) + 1)
            for slot in places.made:
                self.scores.begin_chunk(slot)
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
                self.store.release(places.made)

    def lookup(self, streams: list[StreamId]) -> tuple[Ints, Ints]:
        """Chain and rank of each row of a batch."""
        if self._looked_up and self._looked_up[0] == streams:
            return self._looked_up[1:]
        known = self.streams
        numbers = [known[each] if each in known else self._new_chain(each) for each in streams]
        chains = np.array(numbers, np.int64)
        ranks = np.zeros(len(chains), np.int64)
        if len(set(numbers)) < len(numbers):
            order = np.argsort(chains, kind="stable")
            grouped = chains[order]
            first = np.flatnonzero(np.diff(grouped, prepend=-1))
            counts = np.diff(first, append=len(grouped))
            ranks[order] = np.arange(len(grouped)) - np.repeat(first, counts)
        self._looked_up = (streams, chains, ranks)
        return chains, ranks

    def end_streams(self, streams: Iterable[StreamId]) -> None:
        """Let the next steps of these streams begin new chains."""
        for stream in streams:
            if stream in self.streams:
                self._names[self.streams.pop(stream)] = None
                self._looked_up = None

    def _place(self, chains: Ints, ranks: Ints) -> _Places:
        """Find a place for each row, making chunks where streams need them."""
        offsets, slots = self._head_len[chains] + ranks, self.head_slot[chains]
        made: list[int] = []
        hops = offsets // self.store.steps
        if hops.any():
            rows = np.flatnonzero(hops)
            pairs = np.stack([chains[rows], hops[rows]], 1)
            needed, which = np.unique(pairs, axis=0, return_inverse=True)
            try:
                for chain, hop in needed.tolist():
                    before = made[-1] if hop > 1 else int(self.head_slot[chain])
                    made.append(self.store.create(self._names[chain], before))
            except BaseException:
                self.store.release(made)
                raise
            slots[rows] = np.array(made)[which.reshape(-1)]
            offsets -= hops * self.store.steps
        return _Places(chains, ranks, slots, offsets, made)

    def _take_in(self, places: _Places, last_tick: int) -> None:
        """Move heads behind committed rows, and number the items that these complete."""
        chains, ranks, slots, indices, made = places
        store, length = self.store, self.length
        for slot in made if self.priorities else ():
            self.priorities.created(slot)  # type: ignore[union-attr]  # it is there
        # Where a stream occurs several times its last row decides, and numpy assigns in order.
        self.head_slot[chains] = slots
        self._head_len[chains] = store.lengths[slots] = indices + 1
        self._last_tick[chains] = np.arange(last_tick - len(chains) + 1, last_tick + 1)
        filled = self._pending[chains] + ranks + 1
        ready = filled >= length
        numbers = self._started[chains] + np.maximum(filled - length, -1)
        self._pending[chains] = np.minimum(filled, length - 1)
        self._started[chains] = numbers + 1
        online = (numbers % length == 1 % length) & store.own[slots]
        if not ready.all():
            slots, indices, online = slots[ready], indices[ready], online[ready]
        self._push(*store.walk(slots, indices - (length - 1)), np.flatnonzero(online))

    def _push(self, slots: Ints, indices: Ints, online: Ints) -> None:
        """Number items that start there; `online` are positions in them."""
        starts = slots * self.store.steps + indices
        self.online.extend((self.high + online).tolist())
        for first in range(0, len(starts), SLACK):
            part = starts[first : first + SLACK]
            numbers = np.arange(self.high, self.high + len(part))
            self._ring[numbers % self._ring_size] = part
            if self.priorities:
                self.priorities.started(part, numbers)
            self.high += len(part)
            self._evict(self.items - self.capacity)

    # --- items -----------------------------------------------------------------------------------

    def starts(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Slot and index of the first step of items."""
        return np.divmod(self._ring[numbers % self._ring_size], self.store.steps)

    def take_online(self, count: int) -> list[int]:
        """Up to `count` windows that were never sampled, oldest first."""
        return [self.online.popleft() for _ in range(min(count, len(self.online)))]

    def followed_by_first(self, slots: Ints, indices: Ints) -> NDArray[np.bool_]:
        """Whether a new episode begins right behind each of the sequences that start there."""
        first, found = self.store.columns.get("is_first"), np.zeros(len(slots), bool)
        if first is not None:
            slots, indices = self.store.walk(slots, indices + self.length)
            stored = indices < self.store.lengths[slots]
            found[stored] = first[slots[stored], indices[stored]]
        return found

    def _completed_at(self, number: int) -> int:
        """The tick of the step that completed a living item."""
        slot, index = self.starts(np.array([number]))
        slot, index = self.store.walk(slot, index + self.length - 1)
        return int(self.store.ticks[slot[0], index[0]])

    def items_until(self, tick: int) -> int:
        """Number of the first living item that was completed after `tick`."""
        return self.low + bisect_right(range(self.low, self.high), tick, key=self._completed_at)

    def finished(self, since: int) -> list[Finished]:
        """The episodes of this run that ended after a tick, in order."""
        found = [] if self.ledger is None else [e for e in self.ledger.evicted if e.tick > since]
        for head in self.head_slot[(self.head_slot >= 0) & (self._last_tick > since)].tolist():
            for slot in self.store.preceding(head):
                if self.store.ticks[slot, self.store.lengths[slot] - 1] <= since:
                    break
                found += self.scores.finished(slot, since)
        return sorted(set(found))

    # --- chains ----------------------------------------------------------------------------------

    def take_in_chains(self, chains: Collection[tuple[list[int], StreamId | None]]) -> None:
        """Number the items of chains found on disk, in the order they were completed.

        A chain is given as its slots, with the stream that will continue it, if any.
        """
        parts = [self._restore(slots, stream) for slots, stream in chains]
        if parts:
            starts = np.concatenate([start for start, _ in parts])
            order = np.argsort(np.concatenate([tick for _, tick in parts]), kind="stable")
            self._push(*np.divmod(starts[order], self.store.steps), np.zeros(0, np.int64))
            self._sweep(self._patience)
            self._shrink()

    def _restore(self, slots: list[int], stream: StreamId | None) -> tuple[Ints, Ints]:
        """Take in a chain: flat positions of the starts of its items, and the ticks of the steps
        that complete them."""
        store, chain, positions = self.store, self._new_chain(stream), []
        for slot in slots:
            positions.append(slot * store.steps + np.arange(store.lengths[slot]))
            if self.priorities:
                self.priorities.created(slot)
        store.link(slots)
        steps = np.concatenate(positions)
        ticks = store.ticks[np.divmod(steps, store.steps)]
        self.head_slot[chain], self._head_len[chain] = slots[-1], store.lengths[slots[-1]]
        self._last_tick[chain] = ticks[-1]
        self._pending[chain] = pending = min(len(steps), self.length - 1)
        # What was trained on before is not known, so online windows resume with the next step.
        self._started[chain] = (1 - pending) % self.length
        return steps[: len(steps) - pending], ticks[self.length - 1 :]

    def _new_chain(self, stream: StreamId | None) -> int:
        if not self._free:
            self._allocate(2 * self._heads.shape[1])
        chain = self._free.pop()
        self._names[chain] = stream
        if stream is not None:
            self.streams[stream] = chain
        return chain

    def _allocate(self, size: int) -> None:
        used = self._heads.shape[1]
        heads = np.zeros((5, size), np.int64)
        heads[:, :used] = self._heads
        self._heads = heads
        self.head_slot, self._head_len, self._pending, self._started, self._last_tick = heads
        self._names += [None] * (size - used)
        self._free_chains(range(size - 1, used - 1, -1))

    def _free_chains(self, chains: Sequence[int]) -> None:
        # As if a full chunk had just ended: the next step makes a new one.
        self._heads[:, chains] = np.array([[_NONE], [self.store.steps], [0], [0], [0]])
        self._free += chains

    # --- making room -----------------------------------------------------------------------------

    def _evict(self, count: int) -> None:
        """Remove the oldest items."""
        if count <= 0:
            return
        slots, indices = self.starts(np.arange(self.low, self.low + count))
        self.low += count
        while self.online and self.online[0] < self.low:
            self.online.popleft()
        # Items of a chain leave in order, so the last start in a chunk is the last of them all.
        unused = slots[indices == self.store.steps - 1].tolist()
        if unused:
            self._release(unused)
        if unused or self.journal.committed - self._swept >= self._patience:
            self._sweep(self._patience)

    def _sweep(self, patience: int) -> None:
        """Remove chains that hold nothing newer than the oldest item.

        Streams come to an end without saying so; their last steps would stay for ever. A stream may
        still continue its chain, so it is given `patience` more ticks.
        """
        self._swept = self.journal.committed
        if not self.items:
            return
        limit = np.full(len(self.head_slot), self._completed_at(self.low))
        limit[list(self.streams.values())] -= patience
        idle = self.head_slot[(self.head_slot >= 0) & (self._last_tick < limit)].tolist()
        if idle:
            self._release([slot for head in idle for slot in self.store.preceding(head)])

    def _release(self, slots: list[int]) -> None:
        """Remove chunks; a stream whose chain ended in one of them starts a new one."""
        if self.ledger:
            read = self.ledger.read
            self.ledger.keep(each for slot in slots for each in self.scores.finished(slot, read))
        ended = np.flatnonzero(np.isin(self.head_slot, slots)).tolist()
        self.end_streams(name for chain in ended if (name := self._names[chain]) is not None)
        self._free_chains(ended)
        self.store.release(slots)

    def _make_room(self, chains: Ints, ranks: Ints) -> None:
        """Evict until the chunks that a batch needs fit, or refuse and evict nothing."""
        if (chunks := self._chunks_needed(chains, ranks)) <= self._room():
            return
        pinned, gone = self.store.chunks, None
        if self.items:
            pinned, gone = self._pinned()
        if self._chunks_needed(chains, ranks, gone) > self._room() + self.store.chunks - pinned:
            raise StorageFullError(self._why_full(chunks, pinned))
        while self._chunks_needed(chains, ranks) > self._room():
            self._sweep(patience=0)
            if self._chunks_needed(chains, ranks) > self._room():
                self._evict_some()

    def _chunks_needed(
        self, chains: Ints, ranks: Ints, gone: NDArray[np.bool_] | None = None
    ) -> int:
        """New chunks for rows, now or once chains are `gone`: those start with a new chunk."""
        heads = self._head_len[chains]
        if gone is not None:
            heads = np.where(gone[chains], self.store.steps, heads)
        hops = (heads + ranks) // self.store.steps
        if not hops.any():
            return 0
        most = np.zeros(len(self.head_slot), np.int64)
        np.maximum.at(most, chains, hops)
        return int(most.sum())

    def _pinned(self) -> tuple[int, NDArray[np.bool_]]:
        """Chunks that would stay if every item left, and which chains would be gone."""
        newest = self._completed_at(self.high - 1)
        # Chunks from that of the next item's first step on.
        kept = 1 - (self._head_len - self._pending) // self.store.steps
        gone = (self.head_slot < 0) | (self._last_tick < newest) | (kept < 1)
        return int(kept[~gone].sum()), gone

    def _shrink(self) -> None:
        """Fit what was found on disk into less than it took; streams may lose their last steps."""
        while self._room() < 0:
            self._sweep(patience=0)
            if self._room() < 0:
                self._evict_some()

    def _evict_some(self) -> None:
        """Evict until a chunk has no items left, or a chain has none; without items, a chain."""
        chains = np.flatnonzero(self.head_slot >= 0)
        oldest = chains[self._last_tick[chains].argmin()]
        if not self.items:
            self._release(list(self.store.preceding(int(self.head_slot[oldest]))))
            return
        wanted = max(1, self.items_until(int(self._last_tick[oldest])) - self.low)
        for first in range(self.low, self.low + wanted, SLACK):
            last = min(first + SLACK, self.low + wanted)
            ends = np.flatnonzero(self.starts(np.arange(first, last))[1] == self.store.steps - 1)
            if len(ends):
                wanted = first + int(ends[0]) + 1 - self.low
                break
        self._evict(wanted)

    def _room(self) -> int:
        if self.max_bytes is None:
            return self.store.free_slots
        spare = (self.max_bytes - self.data_bytes) // self.store.chunk_bytes
        return min(self.store.free_slots, spare)

    def _why_full(self, chunks: int, pinned: int) -> str:
        if self.max_bytes is None:
            return (
                f"The replay has no room for {chunks} more chunks in addition to {pinned}: "
                f"raise `chunk` ({self.store.steps} steps) or lower the number of streams."
            )
        return (
            f"max_bytes={self.max_bytes:,} has no room for {chunks} more chunks of "
            f"{self.store.chunk_bytes:,} bytes in addition to the {pinned} that streams are "
            f"writing: raise max_bytes, or lower `chunk` ({self.store.steps} steps)."
        )
