"""How often a process may fail, and how long it is left alone before it is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dreamfleet.fleet.errors import FleetError

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 30.0


class _Failure(NamedTuple):
    time: float
    name: str
    error: str


class Restarts:
    """Counts the failures of the last while. Older ones are forgotten, so a run of a month
    survives a crash a day, and one that fails at every start ends soon.

    Args:
        most: Restarts of one process within the window.
        window: Seconds.
        clock: Seconds, rising.
    """

    def __init__(
        self, most: int, window: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._window, self._clock = most, window, clock
        self._failures: deque[_Failure] = deque()

    def after(self, name: str, error: str) -> float:
        """Seconds until the process that failed is started again, doubling with each failure.

        Raises:
            FleetError: It has failed too often; shows the first error of any process in the
                window, because one failure often brings others along.
        """
        now = self._clock()
        while self._failures and self._failures[0].time <= now - self._window:
            self._failures.popleft()
        count = sum(failure.name == name for failure in self._failures)
        self._failures.append(_Failure(now, name, error))
        if count >= self._most:
            raise FleetError(
                f"{name} failed again after {count} restarts within {self._window:g} s; the run "
                f"ends. The first error was: {self._failures[0].error}"
            )
        return min(_FIRST_BACKOFF * 2.0**count, _LONGEST_BACKOFF)
