"""Keeping inserts and samples in step."""

from __future__ import annotations

import math
import threading

from dreamfleet.errors import ConfigError
from dreamfleet.replay.errors import RateLimitedError


class SamplesPerInsert:
    """Blocks the side that is ahead, so that samples follow inserts at a fixed ratio.

    One insert is one step, one sample is one sequence. `avail` counts the samples owed:

        start           size = 0, avail = -debt (of minsize if not given)
        insert allowed  size < minsize  or ratio <= 0 or avail <  tolerance * ratio
        after insert    size += 1, and avail += ratio once size >= minsize
        sample allowed  size >= minsize and (ratio <= 0 or avail > -tolerance)
        after sample    avail -= 1

    With a positive tolerance the two can never be forbidden at once. A call for several is let
    through whole when its first one would be, so `avail` stays within
    `(-tolerance - count, (tolerance + count) * ratio)` after the start. A ratio of zero or less
    means no limit.
    """

    def __init__(
        self, ratio: float, tolerance: float, minsize: int, debt: float | None = None
    ) -> None:
        if not (math.isfinite(ratio) and math.isfinite(tolerance)):
            raise ConfigError(f"ratio={ratio} and tolerance={tolerance} have to be finite.")
        if minsize < 1:
            raise ConfigError(
                f"minsize={minsize} would allow sampling from nothing: it is at least 1."
            )
        if ratio > 0 and tolerance <= 0:
            raise ConfigError(
                f"tolerance={tolerance} with ratio={ratio} must deadlock: inserts and samples "
                "would wait for each other. Make the tolerance positive; four times the batch size "
                "is a good value."
            )
        self.ratio = ratio
        self.tolerance = tolerance
        self.minsize = minsize
        self.size = 0
        """Steps inserted so far."""
        self.debt = float(minsize if debt is None else debt)
        self.avail = -self.debt
        """Samples owed; negative when samples are ahead."""
        self._finished = False
        self.lock = threading.Condition()
        """Held while something is counted; with it, a caller checks and counts in one step."""

    def can_insert(self) -> bool:
        if self._finished or self.size < self.minsize or self.ratio <= 0:
            return True
        return self.avail < self.tolerance * self.ratio

    def can_sample(self) -> bool:
        if self.size < self.minsize:
            return False
        return self.ratio <= 0 or self.avail > -self.tolerance

    def insert(self, count: int = 1, timeout: float | None = None, who: str = "writer") -> None:
        """Wait until inserting is allowed, then count it; `RateLimitedError` after `timeout`."""
        with self.lock:
            if not self.lock.wait_for(self.can_insert, timeout):
                raise self._no_insert(who)
            earning = max(0, min(count, self.size + count - self.minsize + 1))
            self.size += count
            self.avail += self.ratio * earning
            self.lock.notify_all()

    def sample(self, count: int = 1, timeout: float | None = None, who: str = "sampler") -> None:
        """Wait until sampling is allowed, then count it; `RateLimitedError` after `timeout`."""
        with self.lock:
            if not self.lock.wait_for(self.can_sample, timeout):
                raise self._no_sample(who)
            self.avail -= count
            self.lock.notify_all()

    def finish(self, count: int) -> None:
        """Allow all inserts from now on, and at least `count` more samples. May be repeated."""
        with self.lock:
            self._finished = True
            self.grant(count)

    def grant(self, count: int) -> float:
        """Allow at least `count` more samples; returns how many were added."""
        with self.lock:
            before, self.avail = self.avail, max(self.avail, count - self.tolerance)
            self.lock.notify_all()
            return self.avail - before

    def reopen(self) -> None:
        """Limit inserts again: the run goes on after `finish`."""
        with self.lock:
            self._finished = False

    def start(self, size: int, avail: float) -> None:
        """Go on with so many stored steps, and with what is owed by `Positions.owed`."""
        with self.lock:
            self.size, self.avail = size, avail
            self.lock.notify_all()

    def _no_insert(self, who: str) -> RateLimitedError:
        missing = math.floor(self.avail - self.tolerance * self.ratio) + 1
        trained = "sequence is trained on" if missing == 1 else "sequences are trained on"
        return RateLimitedError(
            f"{who} is ahead of training and waits until {missing} more {trained}."
        )

    def _no_sample(self, who: str) -> RateLimitedError:
        if self.size < self.minsize:
            return RateLimitedError(
                f"{who} waits for the first steps: {self.size} of {self.minsize} were collected."
            )
        missing = math.floor((-self.tolerance - self.avail) / self.ratio) + 1
        steps = "step" if missing == 1 else "steps"
        return RateLimitedError(
            f"{who} is ahead of collecting and waits for {missing} more {steps}."
        )
