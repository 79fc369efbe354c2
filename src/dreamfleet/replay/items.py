"""Items in the order they were completed.

An item is numbered when its last step arrives and items leave from the old end, so the living ones
are always one range of numbers `[low, high)`. Selectors draw numbers; a ring maps a number to the
step the item starts at. That is eight bytes an item, and every operation is a slice.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dreamfleet.replay.store import Ints

SLACK = 4096
"""Items that may be pushed before old ones have to leave."""


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
        """Let the oldest items go; slots in which no living item starts any more."""
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
        """Up to `count` windows that were never handed out, oldest first."""
        return [self.online.popleft() for _ in range(min(count, len(self.online)))]
