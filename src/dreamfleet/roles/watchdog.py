"""Ends a process that hangs."""

from __future__ import annotations

import faulthandler
import threading
import time

_PARTS = 10


class Watchdog:
    """Ends this process with its tracebacks in the log when it was not patted for a while.

    The timer is one of the interpreter's own threads that needs no lock of it, so that also code
    that hangs in C is ended. It is set anew only now and then, because that costs a thread. Outside
    of the main thread, where a process holds more than what is watched, nothing is done.

    Args:
        seconds: At least so long without a pat; 0 for never.
    """

    def __init__(self, seconds: float) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._seconds = seconds if main else 0.0
        self._next = 0.0

    @property
    def interval(self) -> float | None:
        """How long to wait for others at most before the next pat; None for as long as it takes."""
        return self._seconds / _PARTS if self._seconds else None

    def pat(self, *, force: bool = False) -> None:
        """Say that things go on; with `force` the time allowed begins right now."""
        if not self._seconds:
            return
        now = time.monotonic()
        if now >= self._next or force:
            self._next = now + self._seconds / _PARTS
            # Longer by a part: the pats that follow within the interval do not set it again.
            faulthandler.dump_traceback_later(self._seconds * (1 + 1 / _PARTS), exit=True)

    def leave(self) -> None:
        """Stop watching until the next pat."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            self._next = 0.0
