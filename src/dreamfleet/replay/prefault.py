"""Having fresh pages ready before they are written.

The first write to a page of a new chunk costs a fault, which takes longer than copying the step.
A thread asks the kernel for the pages of new chunks instead; the call does not hold Python's lock.
It is only ever a help: a page that is not ready in time faults as usual.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue

from dreamfleet.replay.arena import Arena


class Prefault:
    """One thread an arena, started with the first chunk; it ends with the arena."""

    def __init__(self, arena: Arena) -> None:
        self._jobs: SimpleQueue[int | None] = SimpleQueue()
        self._arena = weakref.ref(arena)
        self._thread: threading.Thread | None = None
        weakref.finalize(arena, self._jobs.put, None)

    def request(self, slot: int) -> None:
        """The chunk in this slot is about to be written."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._arena), name="replay-prefault", daemon=True
            )
            self._thread.start()
        self._jobs.put(slot)

    def stop(self) -> None:
        """End the thread; called before the arena is unmapped."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()


def _work(jobs: SimpleQueue[int | None], find: weakref.ref[Arena]) -> None:
    while (slot := jobs.get()) is not None:
        arena = find()
        if arena is None:
            return
        arena.populate(slot)
        del arena
