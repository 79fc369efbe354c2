"""Steps, chains and items of one schema, kept consistent with the journal.

The order of an append is what makes it safe to be killed anywhere: make the chunks, write the
rows, write their ticks, note the batch, commit. Only then are cursors and items moved in memory,
and only then does anything old leave.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from dreamfleet.replay.episodes import Finished, Ledger, Scores
from dreamfleet.replay.errors import StorageFullError
from dreamfleet.replay.index import SLACK, Chains, Items, Places
from dreamfleet.replay.schema import Schema, StreamId
from dreamfleet.replay.selectors import Selector
from dreamfleet.replay.storage.journal import Journal, Source
from dreamfleet.replay.storage.store import MAX_SLOTS, Ints, Store

SPARE_SLOTS = 4096
"""Chunks for which addresses are reserved in addition to twice those of the capacity."""
_LEAST_PATIENCE = 1024
_INDEX_BYTES_PER_ITEM = 8
_PRIORITY_BYTES_PER_ITEM = 8 + 8 + 4


class SizeEstimate(NamedTuple):
    """Bytes that a replay takes at full capacity."""

    ram: int
    disk: int


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
        ledger: Ledger | None = None,
    ) -> None:
        # A directory may hold more chunks than the capacity needs: it was larger, or had more
        # streams. They are all looked at before the oldest leave.
        slots = max(2 * -(-capacity // steps), found) + SPARE_SLOTS
        self.store = Store(schema, steps, min(slots, MAX_SLOTS), directory, journal.id)
        self.chains = Chains(self.store, length)
        self.items = Items(capacity, steps)
        self.length = length
        self.max_bytes = max_bytes
        # How long a stream may pause, in steps of the others, before its last steps leave.
        self._patience = max(capacity, 4 * steps, _LEAST_PATIENCE)
        self._swept = 0
        self.scores = Scores(self.store)
        self.ledger = ledger
        self.journal = journal
        self._before_release = before_release
        selector.bind(self.store, self.items, length)
        self.priorities = selector.prioritized

    @property
    def data_bytes(self) -> int:
        return self.store.chunks * self.store.chunk_bytes

    @property
    def index_bytes(self) -> int:
        """Memory used in addition to the steps themselves."""
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
        # Some of the streams may have lost their steps to make room, and start a new chain.
        chains, ranks = self.chains.lookup(streams)
        places = self.chains.place(chains, ranks)
        last = self.journal.committed + len(streams)
        try:
            self.store.write(places.slots, places.indices, arrays, last - len(streams) + 1)
            for before, slot in places.links:
                self.scores.begin_chunk(slot, before)
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

    def followed_by_first(self, slots: Ints, indices: Ints) -> NDArray[np.bool_]:
        """Whether a new episode begins right behind each of the sequences that start there."""
        first, behind = self.store.columns.get("is_first"), indices + self.length
        found = np.zeros(len(slots), bool)
        if first is None:
            return found
        inside = behind < self.store.lengths[slots]
        found[inside] = first[slots[inside], behind[inside]]
        for row in np.flatnonzero(~inside).tolist():  # few: it is in another chunk, or not there
            slot, index = int(slots[row]), int(behind[row])
            while slot >= 0 and index >= self.store.steps:
                slot, index = int(self.store.next[slot]), index - self.store.steps
            found[row] = slot >= 0 and index < self.store.lengths[slot] and first[slot, index]
        return found

    def finished(self, since: int) -> list[Finished]:
        """The episodes of this run that ended after a tick, in order."""
        found = [] if self.ledger is None else [e for e in self.ledger.evicted if e.tick > since]
        for chain in np.flatnonzero((self.chains.head_slot >= 0) & (self.chains.last_tick > since)):
            for slot in self.store.preceding(int(self.chains.head_slot[chain])):
                if self.store.ticks[slot, self.store.lengths[slot] - 1] <= since:
                    break
                found += self.scores.finished(slot, since)
        return sorted(set(found))

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
        for slots in [*(slots for slots, _ in chains), *(grown or {}).values()]:
            for slot in slots if self.priorities else ():
                self.priorities.created(slot)  # type: ignore[union-attr]  # it is there
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
        """Remove chains that hold nothing newer than the oldest item.

        Streams come to an end without saying so; their last steps would stay for ever.
        """
        self._swept = self.journal.committed
        if len(self.items):
            idle = self.chains.idle_since(self.completed_at(self.items.low), patience)
            if idle:
                self._release(idle)

    def _release(self, slots: list[int]) -> None:
        if self.ledger:
            read = self.ledger.read
            self.ledger.keep(each for slot in slots for each in self.scores.finished(slot, read))
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
                f"The replay has no place for {chunks} more chunks in addition to {pinned}: "
                f"raise `chunk` ({self.store.steps} steps) or lower the number of streams."
            )
        return (
            f"max_bytes={self.max_bytes:,} has no room for {chunks} more chunks of "
            f"{self.store.chunk_bytes:,} bytes in addition to the {pinned} that streams are "
            f"writing: raise max_bytes, or lower `chunk` ({self.store.steps} steps)."
        )

    def size_when_full(self) -> SizeEstimate:
        """Bytes of RAM and disk at full capacity.

        In addition to the chunks for all items, each stream has a first chunk that is partly used,
        the one it writes, and those that only the end of an item reaches into.
        """
        store, capacity = self.store, self.items.capacity
        partly_used = len(self.chains.streams) * (2 + (self.length - 1) // store.steps)
        data = (-(-capacity // store.steps) + partly_used) * store.chunk_bytes
        if self.max_bytes is not None:
            data = min(data, self.max_bytes)
        index = capacity * (
            _INDEX_BYTES_PER_ITEM + (_PRIORITY_BYTES_PER_ITEM if self.priorities else 0)
        )
        if store.directory is None:
            return SizeEstimate(ram=index + data, disk=0)
        return SizeEstimate(ram=index, disk=data)

    def shortages(self) -> list[str]:
        """One sentence for each bound, or resource of the machine, that is too small for the
        capacity."""
        store, capacity, streams = self.store, self.items.capacity, len(self.chains.streams)
        full, problems = self.size_when_full(), []
        most, most_bytes = store.slots * store.steps, store.slots * store.chunk_bytes
        if capacity > most and (self.max_bytes is None or self.max_bytes > most_bytes):
            problems.append(
                f"The replay can hold about {most:,} sequences in {store.slots:,} chunks, not its "
                f"capacity of {capacity:,}: lower it, or raise `chunk` ({store.steps} steps) where "
                "chunks are small."
            )
        if self.max_bytes is not None and self.max_bytes < 2 * streams * store.chunk_bytes:
            problems.append(
                f"max_bytes={self.max_bytes:,} holds fewer than two chunks of "
                f"{store.chunk_bytes:,} bytes for each of {streams} streams, so few sequences will "
                f"last: raise max_bytes, or lower `chunk` ({store.steps} steps)."
            )
        on_disk = store.directory is not None
        free = psutil.virtual_memory().available + (0 if on_disk else self.data_bytes)
        if full.ram > free:
            problems.append(
                f"The replay needs {_readable(full.ram)} of memory when full, but the machine has "
                f"{_readable(free)} free: lower its capacity"
                + ("." if on_disk else ", or give it a directory.")
            )
        if store.directory is not None:
            try:
                free = shutil.disk_usage(store.directory).free + self.data_bytes
            except FileNotFoundError:
                return problems  # The next write reports that the directory is gone.
            if full.disk > free:
                problems.append(
                    f"The replay needs {_readable(full.disk)} of disk when full, but "
                    f"{store.directory} has {_readable(free)} free: lower replay.capacity "
                    "or set replay.max_bytes."
                )
        return problems

    def save_position(self) -> dict[str, NDArray[Any]]:
        """The online queue, and how far each stream's online windows are.

        Items get other numbers when a directory is opened again. The anchor tells by how much: the
        number that the next item had when a certain tick was the newest.
        """
        streams = self.chains.streams
        names = json.dumps(list(streams)).encode()
        return {
            "anchor": np.array([self.journal.committed, self.items.high], np.int64),
            "online/queue": np.array(self.items.online, np.int64),
            "online/streams": np.frombuffer(names, np.uint8),
            "online/started": self.chains.started[list(streams.values())],
        }

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Restore the queue, and extend it by the windows that were completed since."""
        if "anchor" not in state:
            return
        tick, number = (int(value) for value in state["anchor"])
        since = self.items_until(tick)
        names = json.loads(np.asarray(state["online/streams"], np.uint8).tobytes())
        started = dict(zip(names, np.asarray(state["online/started"]).tolist(), strict=True))
        queue = [np.asarray(state["online/queue"], np.int64) + since - number]
        later = np.arange(since, self.items.high)
        chains = self.chains.owners()[self.items.starts(later)[0]]
        for stream, chain in self.chains.streams.items():
            # A stream that began after the checkpoint is fresh from its first item on.
            mine = later[chains == chain]
            ordinals = started.get(stream, 0) + np.arange(len(mine))
            queue.append(mine[ordinals % self.length == 1 % self.length])
            self.chains.started[chain] = started.get(stream, 0) + len(mine)
        self.items.requeue(np.concatenate(queue))


def _readable(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
