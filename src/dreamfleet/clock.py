"""Doing something every so many seconds, alone or in step with other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable


class LocalClock:
    """True once every `every` seconds:

        if should_log():
            ...

    `every` of 0 is never and below 0 is always. The interval begins with the first call, which
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


class GlobalClock:
    """A clock that gives every host the same answer at the same call.

    Work that all hosts do together hangs if only some of them begin it, and their clocks never
    agree to the last step. So host 0 looks at its clock and the others are told.

    Args:
        every, first, now: As for `LocalClock`.
        broadcast: Takes this host's answer and returns that of host 0, on all hosts alike. Every
            host must call the clock equally often. None with a single host.
    """

    def __init__(
        self,
        every: float,
        *,
        first: bool = False,
        broadcast: Callable[[bool], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = LocalClock(every, first=first, now=now)
        # Never and always need no agreement, and a broadcast costs every host a round trip.
        self._broadcast = broadcast if every > 0 else None

    def __call__(self) -> bool:
        answer = self._local()
        return answer if self._broadcast is None else bool(self._broadcast(answer))
