"""The index: where each stream writes next, and where each sequence starts.

A chain is an unbroken run of a stream's steps, from chunk to chunk. Its head is the place of the
next step; its tail is the first step of the next item, `length - 1` steps behind. `Chains` keeps
all of it in arrays indexed by chain, so a batch is handled without a loop over its rows.

An item is a sequence that can be sampled. It is numbered when its last step arrives, and items
leave from the old end, so the living ones are always one range of numbers `[low, high)`. Selectors
draw numbers; `Items` maps a number to the step the item starts at, in eight bytes an item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.schema import StreamId
from dreamfleet.replay.storage.store import Ints, Store

SLACK = 4096
"""Items that may be pushed before old ones have to leave."""
_NONE = -1
_FIELDS = ("head_slot", "head_len", "tail_slot", "tail_index", "pending", "started", "last_tick")


class Items:
    """A ring of item starts and the queue of online windows."""

    def __init__(self, capacity: int, steps: int) -> None:
        self.capacity = capacity
        self.low = 0
        self.high = 0
        self.online: deque[int] = deque()
        self._steps = steps
        self._size = capacity + SLACK
        # Zeroed pages of a large array take memory only once they are written.
        self._ring = np.zeros(self._size, np.int64)

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def index_bytes(self) -> int:
        return 8 * min(self.high, self._size)

    def push(self, slots: Ints, indices: Ints, online: Ints) -> None:
        """Append items (at most `SLACK` before the next `pop`); `online` are positions in them."""
        count = len(slots)
        first = self.high
        at = (first + np.arange(count)) % self._size
        self._ring[at] = slots * self._steps + indices
        self.high += count
        self.online.extend((first + online).tolist())

    def starts(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Slot and index of the first step of items."""
        return np.divmod(self._ring[numbers % self._size], self._steps)

    def pop(self, count: int) -> list[int]:
        """Remove the oldest items; returns slots in which no living item starts any more."""
        count = min(count, len(self))
        if count <= 0:
            return []
        slots, indices = self.starts(np.arange(self.low, self.low + count))
        self.low += count
        while self.online and self.online[0] < self.low:
            self.online.popleft()
        # Items of a chain leave in order, so the last start in a chunk is the last of them all.
        return [int(slot) for slot in slots[indices == self._steps - 1]]

    def until_chunk_end(self) -> int:
        """How many of the oldest items have to go before a chunk becomes free."""
        for first in range(self.low, self.high, SLACK):
            last = min(first + SLACK, self.high)
            _, indices = self.starts(np.arange(first, last))
            ends = np.flatnonzero(indices == self._steps - 1)
            if len(ends):
                return first + int(ends[0]) + 1 - self.low
        return len(self)

    def requeue(self, numbers: Ints) -> None:
        """Replace the online queue."""
        self.online = deque(np.unique(numbers[numbers >= self.low]).tolist())

    def take_online(self, count: int) -> list[int]:
        """Up to `count` windows that were never sampled, oldest first."""
        return [self.online.popleft() for _ in range(min(count, len(self.online)))]


class Places(NamedTuple):
    """Where the rows of a batch go."""

    chains: Ints
    ranks: Ints
    """How many earlier rows of the batch belong to the same chain."""
    slots: Ints
    indices: Ints
    links: list[tuple[int, int]]
    """New chunks: the slot before (or -1) and the slot."""


class Chains:
    """The cursors of every chain of a store."""

    def __init__(self, store: Store, length: int) -> None:
        self.store = store
        self.length = length
        self.streams: dict[StreamId, int] = {}
        self._names: list[StreamId | None] = []
        self._free: list[int] = []
        self.head_slot: Ints
        """The chunk that is written, or -1."""
        self.head_len: Ints
        """Steps in it."""
        self.tail_slot: Ints
        """The chunk in which the next item starts, or -1."""
        self.tail_index: Ints
        """The step in it."""
        self.pending: Ints
        """Steps from the tail on; the next item is complete when they are `length`."""
        self.started: Ints
        """Items so far; every `length`-th of them is an online window."""
        self.last_tick: Ints
        """The tick of the newest step."""
        self._allocate(16)
        self._cached: tuple[list[StreamId], Ints, Ints] | None = None

    def lookup(self, streams: list[StreamId]) -> tuple[Ints, Ints]:
        """Chain and rank of each row of a batch."""
        if self._cached and self._cached[0] == streams:
            return self._cached[1], self._cached[2]
        chains = np.array([self._chain(stream) for stream in streams], np.int64)
        ranks = np.zeros(len(chains), np.int64)
        if len(set(streams)) < len(streams):
            order = np.argsort(chains, kind="stable")
            grouped = chains[order]
            first = np.flatnonzero(np.diff(grouped, prepend=-1))
            counts = np.diff(first, append=len(grouped))
            ranks[order] = np.arange(len(grouped)) - np.repeat(first, counts)
        self._cached = (streams, chains, ranks)
        return chains, ranks

    def chunks_needed(
        self, chains: Ints, ranks: Ints, gone: NDArray[np.bool_] | None = None
    ) -> int:
        """New chunks that a batch with these rows needs, now or once chains are `gone`."""
        heads = self.head_len[chains]
        if gone is not None:
            heads = np.where(gone[chains], self.store.steps, heads)
        hops = (heads + ranks) // self.store.steps
        if not hops.any():
            return 0
        most = np.zeros(len(self._names), np.int64)
        np.maximum.at(most, chains, hops)
        return int(most.sum())

    def place(self, chains: Ints, ranks: Ints) -> Places:
        """Find a place for each row, making chunks where streams need them."""
        steps = self.store.steps
        offsets = self.head_len[chains] + ranks
        slots = self.head_slot[chains]
        links: list[tuple[int, int]] = []
        hops = offsets // steps
        if hops.any():
            offsets = offsets - hops * steps
            try:
                slots = self._extend(chains, hops, slots, links)
            except BaseException:
                self.store.release(slot for _, slot in links)
                raise
        return Places(chains, ranks, slots, offsets, links)

    def advance(self, places: Places, last_tick: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Take committed rows in: slot and index of each item they complete, and whether an
        online window starts there."""
        store, chains = self.store, places.chains
        for before, slot in places.links:
            if before >= 0:
                store.link(before, slot)
        # Where a stream occurs several times its last row decides, and numpy assigns in order.
        self.head_slot[chains] = places.slots
        self.head_len[chains] = places.indices + 1
        store.lengths[places.slots] = places.indices + 1
        count = len(chains)
        self.last_tick[chains] = np.arange(last_tick - count + 1, last_tick + 1)
        fresh = self.tail_slot[chains] < 0
        if fresh.any():
            born = fresh & (places.ranks == 0)
            self.tail_slot[chains[born]] = places.slots[born]
            self.tail_index[chains[born]] = 0
        filled = self.pending[chains] + places.ranks + 1
        ready = filled >= self.length
        over = np.maximum(filled - self.length, -1)
        origin, offset = self.tail_slot[chains], self.tail_index[chains]
        ordinals = self.started[chains] + over
        starts, indices = store.walk(origin[ready], (offset + over)[ready])
        online = (ordinals % self.length == 1 % self.length)[ready]
        self.pending[chains] = np.minimum(filled, self.length - 1)
        self.started[chains] = ordinals + 1
        tail, index = self._normalise(origin, offset + over + 1)
        self.tail_slot[chains], self.tail_index[chains] = tail, index
        return starts, indices, online

    def restore(self, slots: Sequence[int], stream: StreamId | None) -> tuple[Ints, Ints]:
        """Take in a chain found on disk; see `found`. With a stream the chain will be continued."""
        chain = self._new(stream)
        for before, slot in pairwise(slots):
            self.store.link(before, slot)
        self.tail_slot[chain] = slots[0]
        return self.found(chain)

    def lengthen(self, before: int, slots: Sequence[int]) -> int | None:
        """Let chunks follow `before`, if that is the full end of a closed chain: that chain."""
        chain = self.closed_at(before)
        if chain < 0 or self.store.lengths[before] < self.store.steps:
            return None
        for earlier, later in pairwise([before, *slots]):
            self.store.link(earlier, later)
        self.head_slot[chain] = slots[-1]
        return chain

    def closed_at(self, slot: int) -> int:
        """The chain that ends in this slot and that no stream continues, or -1."""
        chains = np.flatnonzero(self.head_slot == slot)
        closed = slot >= 0 and len(chains) and self._names[chains[0]] is None
        return int(chains[0]) if closed else _NONE

    def found(self, chain: int) -> tuple[Ints, Ints]:
        """Take in steps that were found at the end of a chain: flat positions of the starts of the
        items they complete, and the ticks of the steps that complete them."""
        store = self.store
        origin, offset = self._normalise(
            self.tail_slot[chain : chain + 1], self.tail_index[chain : chain + 1]
        )
        slot, first = int(origin[0]), int(offset[0])
        positions, ticks = [], []
        for head in store.following(slot):
            size = int(store.lengths[head])
            positions.append(head * store.steps + np.arange(first, size))
            ticks.append(store.ticks[head, first:size])
            first = 0
        flat, completed = np.concatenate(positions), np.concatenate(ticks)
        items = max(0, len(flat) - self.length + 1)
        self.head_slot[chain], self.head_len[chain] = head, size
        self.last_tick[chain] = completed[-1]
        self.pending[chain] = len(flat) - items
        tail, index = self._normalise(origin, offset + items)
        self.tail_slot[chain], self.tail_index[chain] = tail[0], index[0]
        # What was trained on before is not known, so online windows resume with the next step.
        self.started[chain] = (1 - self.pending[chain]) % self.length
        return flat[:items], completed[self.length - 1 :]

    def forget(self, slots: set[int]) -> None:
        """Chunks are removed: a stream whose chain ended in one of them starts a new one."""
        for chain in np.flatnonzero(np.isin(self.head_slot, list(slots))).tolist():
            name = self._names[chain]
            if name is not None:
                del self.streams[name]
                self._names[chain] = None
            self._reset(chain)
            self._free.append(chain)
            self._cached = None

    def idle_since(self, tick: int, patience: int) -> list[int]:
        """Slots of chains whose newest step is older than `tick`.

        A stream may still continue its chain, so it is given `patience` more ticks.
        """
        used = len(self._names)
        open_chains = np.zeros(used, bool)
        open_chains[list(self.streams.values())] = True
        limit = np.where(open_chains, tick - patience, tick)
        idle = np.flatnonzero((self.head_slot[:used] >= 0) & (self.last_tick[:used] < limit))
        tails = self.tail_slot[idle].tolist()
        return [slot for tail in tails for slot in self.store.following(tail)]

    def pinned(self, tick: int) -> tuple[int, NDArray[np.bool_]]:
        """Chunks that would stay if every item left, the newest of which was completed at `tick`,
        and which chains would be gone."""
        used = len(self._names)
        gone = (self.head_slot[:used] < 0) | (self.last_tick[:used] < tick)
        count = 0
        for chain in np.flatnonzero(~gone):
            slot = int(self.tail_slot[chain])
            if self.tail_index[chain] >= self.store.steps:
                slot = int(self.store.next[slot])
            gone[chain] = slot < 0
            count += len(list(self.store.following(slot)))
        return count, gone

    def oldest(self) -> list[int]:
        """Slots of the chain that was idle longest."""
        chains = np.flatnonzero(self.head_slot >= 0)
        head = int(self.head_slot[chains[self.last_tick[chains].argmin()]])
        return list(self.store.preceding(head))

    def oldest_end(self) -> int:
        """The tick at which the chain that was idle longest ends."""
        return int(self.last_tick[self.head_slot >= 0].min())

    def owners(self) -> Ints:
        """The chain that each slot belongs to, or -1."""
        owner = np.full(self.store.slots, _NONE, np.int64)
        for chain in np.flatnonzero(self.head_slot >= 0):
            owner[list(self.store.preceding(int(self.head_slot[chain])))] = chain
        return owner

    @property
    def index_bytes(self) -> int:
        return sum(getattr(self, field).nbytes for field in _FIELDS)

    def _normalise(self, slots: Ints, offsets: Ints) -> tuple[Ints, Ints]:
        """Step from the end of a full chunk into the next one, where there is a next one."""
        if not (offsets >= self.store.steps).any():
            return slots, offsets
        # The step before the offset is there, unless the offset is the beginning of a chunk.
        back = (offsets > 0).astype(np.int64)
        slots, indices = self.store.walk(slots, offsets - back)
        indices = indices + back
        over = (indices >= self.store.steps) & (self.store.next[slots] >= 0)
        return np.where(over, self.store.next[slots], slots), np.where(over, 0, indices)

    def _extend(self, chains: Ints, hops: Ints, slots: Ints, links: list[tuple[int, int]]) -> Ints:
        """Make the chunks that rows with hops need."""
        slots = slots.copy()
        rows = np.flatnonzero(hops)
        pairs = np.stack([chains[rows], hops[rows]], 1)
        needed, which = np.unique(pairs, axis=0, return_inverse=True)
        made: list[int] = []
        for chain, hop in needed.tolist():
            before = made[-1] if hop > 1 else int(self.head_slot[chain])
            made.append(self.store.create(self._names[chain], before))
            links.append((before, made[-1]))
        slots[rows] = np.array(made)[which.reshape(-1)]
        return slots

    def _chain(self, stream: StreamId) -> int:
        chain = self.streams.get(stream)
        return self._new(stream) if chain is None else chain

    def _new(self, stream: StreamId | None) -> int:
        if self._free:
            chain = self._free.pop()
            self._names[chain] = stream
        else:
            chain = len(self._names)
            if chain == len(self.head_slot):
                self._allocate(2 * chain)
            self._names.append(stream)
        if stream is not None:
            self.streams[stream] = chain
        self._reset(chain)
        return chain

    def _reset(self, chain: int) -> None:
        # As if a full chunk had just ended: the next step makes a new one.
        self.head_slot[chain], self.head_len[chain] = _NONE, self.store.steps
        self.tail_slot[chain], self.tail_index[chain] = _NONE, 0
        self.pending[chain] = self.started[chain] = self.last_tick[chain] = 0

    def _allocate(self, size: int) -> None:
        for field in _FIELDS:
            grown = np.full(size, _NONE, np.int64)
            old: Ints = getattr(self, field, grown[:0])
            grown[: len(old)] = old
            setattr(self, field, grown)
