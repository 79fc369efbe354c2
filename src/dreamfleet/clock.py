"""Doing something every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class LocalClock:
    """True once every `every` seconds:

        if should_log():
            ...

    `every` of 0 is never and below 0 is always. The interval starts with the first call, which
    answers `first`; a call that comes late is answered once, not once for each interval missed.
    With `early` the first interval is that long, and each is twice the one before, up to `every`.
    """

    def __init__(
        self,
        every: float,
        *,
        first: bool = False,
        early: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._wait = every if early is None else min(early, every)
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
        if now < self._previous + self._wait:
            return False
        self._previous = now
        self._wait = min(2 * self._wait, self._every)
        return True


Vote = Mapping[str, Any]
Gather = Callable[[Vote], Sequence[Vote]]
"""Takes what this host says, and returns what every host has said, in the order of the hosts."""


def single_host(said: Vote) -> Sequence[Vote]:
    """What all hosts say, if there is one."""
    return [said]


class GlobalClock:
    """A clock for what all hosts of a learner have to do at the same step, such as saving:

        clock = GlobalClock({"save": 120.0}, gather)
        agreed = clock(ready=True)
        if agreed.due("save"): ...

    A collective operation hangs if only some hosts start it, and their clocks never agree to the
    last step. So the hosts meet in rounds: each says what it knows, and all decide alike from
    what all have said. Whether an interval has passed is decided by host 0.

    Args:
        every: Seconds by name, as `LocalClock` understands them.
        gather: How the hosts meet; without it there is one.
    """

    def __init__(
        self,
        every: Mapping[str, float],
        gather: Gather = single_host,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clocks = {name: LocalClock(seconds, now=now) for name, seconds in every.items()}
        self._gather = gather

    def __call__(self, **said: Any) -> Round:
        """Meet the other hosts; returns when all are there. `said` may also name an interval that
        has passed for another reason than the time."""
        due = {name: clock() or said.get(name, False) for name, clock in self._clocks.items()}
        return Round(self._gather({**said, **due}))


class Round:
    """What all hosts have said."""

    def __init__(self, said: Sequence[Vote]) -> None:
        self._said = said

    def due(self, name: str) -> bool:
        """Whether host 0 says it."""
        return bool(self._said[0][name])

    def any(self, name: str) -> bool:
        return any(said[name] for said in self._said)

    def all(self, name: str) -> bool:
        return all(said[name] for said in self._said)

    def total(self, name: str) -> int:
        return sum(said[name] for said in self._said)
