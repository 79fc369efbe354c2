"""Doing something every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable


class LocalClock:
    """True once every `every` seconds:

        if should_log():
            ...

    `every` of 0 is never and below 0 is always. The interval starts with the first call, which
    answers `first`; a call that comes late is answered once, not once for each interval missed.
    """

    def __init__(
        self,
        every: float,
        *,
        first: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._first = first
        self._now = now
        self._previous: float | None = None

    def __call__(self) -> bool:
        if self._every <= 0:
            return self._every < 0
        now = self._now()
        if self._previous is None:
            self._previous = now
            return self._first
        if now < self._previous + self._every:
            return False
        self._previous = now
        return True


class GlobalClock(LocalClock):
    """A clock for what all hosts of a learner have to do at the same step, such as saving.

    A collective operation hangs if only some hosts start it, and their clocks never agree to the
    last step. A learner has one host today, so its own clock decides. With several hosts, host 0
    decides and the others are told, here and nowhere else.
    """
