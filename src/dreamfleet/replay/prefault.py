"""Having pages ready before they are written.

The first write to a page of a new chunk costs a fault, which takes longer than copying the step.
A thread asks the kernel for the pages that streams will write next; the call does not hold
Python's lock. It stays a few dozen steps ahead, so hardly any memory is taken early. It is only
ever a help: a page that is not ready in time faults as usual.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from dreamfleet.replay.arena import Arena

AHEAD = 64
"""Steps asked for at a time, when the same number is still left."""
_WORTH_IT = 8192

_Queue = SimpleQueue[list[tuple[int, int, int]] | None]


class Prefault:
    """One thread an arena, started with the first chunk; it ends with the arena."""

    def __init__(self, arena: Arena, columns: Iterable[tuple[int, int]], steps: int) -> None:
        """`columns`: where each column starts in a slot, and the bytes of a step in it."""
        self._columns = [(at, row) for at, row in columns if row * AHEAD >= _WORTH_IT]
        self._steps = steps
        self._arena = weakref.ref(arena)
        self._jobs: _Queue = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(arena, self._jobs.put, None)

    def written(self, slots: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """Rows were written there; where that begins another stretch, ask for the one after."""
        due = indices % AHEAD == 0
        if not self._columns or not due.any():
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._arena), name="replay-prefault", daemon=True
            )
            self._thread.start()
        ranges = []
        for slot, index in zip(slots[due].tolist(), indices[due].tolist(), strict=True):
            first = index + AHEAD if index else 0
            last = min(index + 2 * AHEAD, self._steps)
            if first < last:
                ranges += [(slot, at + first * row, at + last * row) for at, row in self._columns]
        self._jobs.put(ranges)

    def stop(self) -> None:
        """End the thread; called before the arena is unmapped."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()


def _work(jobs: _Queue, find: weakref.ref[Arena]) -> None:
    while (job := jobs.get()) is not None:
        arena = find()
        if arena is None:
            return
        arena.populate(job)
        # Not kept while waiting for the next job: the arena may go away meanwhile.
        del arena
