"""Rows of arrays for things that come and go, such as environments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class SlotTable:
    """Gives every id a slot: the index of its row in arrays that the owner keeps.

    Slots are reused once their id is removed, so the arrays stay as small as the most ids at one
    time. The row of a reused slot still holds the values of the id before.

    Not thread-safe.

    Args:
        size: Number of slots at first.
        grow: Called with the new number of slots, twice the old one, before one of the new slots
            is used. The owner makes its arrays that long.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        size: int = 16,
        *,
        grow: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grow = grow
        self._clock = clock
        self._slots: dict[int, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._used = np.zeros(size)  # when each slot was last asked for

    @property
    def size(self) -> int:
        """Number of slots, taken and free."""
        return len(self._used)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def slots(self, keys: Sequence[int]) -> NDArray[np.intp]:
        """The slot of each id, which counts as used now. An id without a slot gets one, for which
        the arrays may grow."""
        known = self._slots
        try:
            found = np.array([known[key] for key in keys], np.intp)
        except KeyError:
            for key in keys:
                if key not in known:
                    known[key] = self._take()
            found = np.array([known[key] for key in keys], np.intp)
        self._used[found] = self._clock()
        return found

    def idle(self) -> dict[int, float]:
        """Seconds since each id was last used."""
        now = self._clock()
        return {key: now - float(self._used[slot]) for key, slot in self._slots.items()}

    def recent(self, seconds: float) -> int:
        """How many ids were used within so many seconds."""
        since = self._clock() - seconds
        return int(np.count_nonzero(self._used[list(self._slots.values())] > since))

    def remove(self, keys: Iterable[int]) -> dict[int, int]:
        """Free the slots of ids; returns both, of those that had one."""
        gone = {key: self._slots.pop(key) for key in keys if key in self._slots}
        self._free += gone.values()
        return gone

    def _take(self) -> int:
        if not self._free:
            size = self.size
            self._grow(2 * size)
            self._used = np.concatenate([self._used, np.zeros(size)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()
