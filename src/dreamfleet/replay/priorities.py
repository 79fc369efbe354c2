"""From priorities of steps to priorities of items.

A step belongs to up to `length` items. When steps are updated, every living item that holds one of
them is worked out anew, from the priorities of all its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dreamfleet.replay.items import SLACK, Items
from dreamfleet.replay.selectors import Prioritized
from dreamfleet.replay.store import Ints, Piece, Store
from dreamfleet.replay.sumtree import Floats

_UNKNOWN = np.nan
_NO_ITEM = -1


class Priorities:
    """Priorities of all steps, and the number of the item that starts at each."""

    def __init__(self, store: Store, length: int, selectors: Sequence[Prioritized]) -> None:
        self._store = store
        self._length = length
        self._selectors = selectors
        positions = store.slots * store.steps
        # Zeroed pages take memory only once they are written.
        self._values = np.zeros(positions, np.float32)
        self._numbers = np.zeros(positions, np.int64)
        self._any_known = False
        self._caught_up = 0

    def index_bytes(self, chunks: int) -> int:
        """Memory used with that many chunks."""
        each = self._values.itemsize + self._numbers.itemsize
        return chunks * self._store.steps * each + sum(s.nbytes for s in self._selectors)

    def started(self, slots: Ints, indices: Ints, first: int) -> None:
        """Items with numbers from `first` on start at these steps."""
        positions = slots * self._store.steps + indices
        self._numbers[positions] = np.arange(first, first + len(positions))

    def created(self, slot: int) -> None:
        """A chunk begins in a slot that another may have used before."""
        chunk = slice(slot * self._store.steps, (slot + 1) * self._store.steps)
        self._values[chunk] = _UNKNOWN
        self._numbers[chunk] = _NO_ITEM

    def catch_up(self, items: Items) -> None:
        """Give items that are new since the last draw the priorities that their steps have."""
        first, self._caught_up = max(self._caught_up, items.low), items.high
        if not self._any_known:
            return
        ahead = np.arange(self._length)
        for start in range(first, items.high, SLACK):
            numbers = np.arange(start, min(start + SLACK, items.high))
            slots, indices = items.starts(numbers)
            slots, indices = self._store.walk(
                np.repeat(slots[:, None], self._length, 1), indices[:, None] + ahead
            )
            steps = self._values[slots * self._store.steps + indices]
            told = ~np.isnan(steps).all(1)
            if told.any():
                for selector in self._selectors:
                    known = _filled(steps[told], selector.initial)
                    selector.prioritize(numbers[told], known, items.low, items.high)

    def update(self, runs: list[Piece], values: NDArray[np.float32], low: int, high: int) -> None:
        """Set the priorities of runs of steps, and of every living item that holds one."""
        here = [run for run in runs if run.slot >= 0]
        self._any_known |= bool(here)
        for run in here:
            start = run.slot * self._store.steps + run.start
            self._values[start : start + run.size] = values[run.at : run.at + run.size]
        reach = self._length - 1
        spans = [self._store.span(run.slot, run.start, reach, run.size - 1 + reach) for run in here]
        if sum(map(len, spans)) < self._length:
            return
        positions = np.concatenate(spans)
        numbers = self._numbers[positions]
        # No item starts so late in a span that it would reach into the span that comes next here.
        for end in np.cumsum([len(span) for span in spans]).tolist():
            numbers[max(0, end - reach) : end] = _NO_ITEM
        steps = self._values[positions]
        # An item that two runs share comes twice, with the same value both times.
        for selector in self._selectors:
            windows = sliding_window_view(_filled(steps, selector.initial), self._length)
            selector.prioritize(numbers[: len(windows)], windows, low, high)


def _filled(steps: NDArray[np.float32], initial: float) -> Floats:
    return np.where(np.isnan(steps), initial, steps.astype(np.float64))
