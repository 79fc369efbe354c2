"""Which items a batch is made of.

A selector draws item numbers from the living range `[low, high)`: `high - 1` is the newest item.
Items are only ever added at the high end and removed at the low end, so a removed item can never
be drawn. A draw that does not consume (report, eval) leaves the selector as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError
from dreamfleet.replay.sumtree import Floats, SumTree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """A request for items; there is at least one living item."""

    rng: np.random.Generator
    count: int
    low: int
    high: int
    consume: bool


class Selector(Protocol):
    """How items are chosen. Subclasses of `SimpleSelector` only need `draw`."""

    def draw(self, request: Draw) -> Ints:
        """As many item numbers as requested, possibly with repeats."""
        ...

    def bind(self, size: int) -> None:
        """Called once, before anything else: at most `size` items live at a time."""
        ...

    @property
    def prioritized(self) -> Sequence[Prioritized]:
        """The selectors in this one that follow priorities."""
        ...

    def save(self) -> dict[str, int]:
        """What must survive a restart: item numbers, by name."""
        ...

    def load(self, state: Mapping[str, int], shift: int) -> None:
        """Restore what `save` returned; `shift` is how far item numbers have moved since."""
        ...


class SimpleSelector:
    """What a selector without state of its own answers."""

    def bind(self, size: int) -> None:
        """Nothing depends on the size."""

    @property
    def prioritized(self) -> Sequence[Prioritized]:
        return ()

    def save(self) -> dict[str, int]:
        return {}

    def load(self, state: Mapping[str, int], shift: int) -> None:
        """There is nothing to restore."""


class Uniform(SimpleSelector):
    """Every living item is equally likely."""

    def draw(self, request: Draw) -> Ints:
        return request.rng.integers(request.low, request.high, request.count)


class Fifo(SimpleSelector):
    """Oldest first, each item once; after the newest it starts over with the oldest."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self, request: Draw) -> Ints:
        low, high = request.low, request.high
        first = self._next if low <= self._next < high else low
        numbers = low + (first - low + np.arange(request.count)) % (high - low)
        if request.consume and request.count:
            self._next = int(numbers[-1]) + 1
        return numbers

    def save(self) -> dict[str, int]:
        return {"next": self._next}

    def load(self, state: Mapping[str, int], shift: int) -> None:
        self._next = state.get("next", 0) + shift


class Recency(SimpleSelector):
    """The k-th newest item has a weight of `k ** -exponent`."""

    def __init__(self, exponent: float = 1.0) -> None:
        if not 0 <= exponent < np.inf:
            raise ConfigError(f"Recency needs a finite exponent of at least 0, not {exponent}.")
        self.exponent = exponent
        self._sums = np.zeros(0)

    def draw(self, request: Draw) -> Ints:
        living = request.high - request.low
        if living > len(self._sums):
            ages = np.arange(1, max(1024, 2 * living) + 1, dtype=np.float64)
            self._sums = np.cumsum(ages**-self.exponent)
        targets = request.rng.random(request.count) * self._sums[living - 1]
        ages = np.searchsorted(self._sums[:living], targets, side="right")
        return np.asarray(request.high - 1 - np.minimum(ages, living - 1), np.int64)


class Prioritized(SimpleSelector):
    """In proportion to priority: an item's is made of those of its steps.

    `(max_fraction * max + (1 - max_fraction) * mean) ** exponent` over the steps of the item.
    Steps start with `initial` and change through `Replay.update`. With `zero_on_sample` an item
    drawn for training drops to zero until one of its steps is updated. When everything is zero the
    draw is uniform.
    """

    def __init__(
        self,
        exponent: float = 0.8,
        initial: float = 1.0,
        max_fraction: float = 0.0,
        zero_on_sample: bool = False,
    ) -> None:
        if not (0 <= exponent < np.inf and 0 <= initial < np.inf and 0 <= max_fraction <= 1):
            raise ConfigError(
                "Prioritized needs a finite exponent >= 0, a finite initial >= 0 and max_fraction "
                f"between 0 and 1, not {exponent}, {initial} and {max_fraction}."
            )
        self.exponent = exponent
        self.initial = initial
        self.max_fraction = max_fraction
        self.zero_on_sample = zero_on_sample
        self._size = 1
        self._tree = SumTree(1)
        self._low = self._high = 0

    @property
    def prioritized(self) -> Sequence[Prioritized]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def bind(self, size: int) -> None:
        self._size, self._tree = size, SumTree(size)

    def draw(self, request: Draw) -> Ints:
        self._catch_up(request.low, request.high)
        numbers = np.empty(request.count, np.int64)
        missing = np.arange(request.count)
        while len(missing):
            if not self._tree.total > 0:
                numbers[missing] = request.rng.integers(request.low, request.high, len(missing))
                break
            leaves = self._tree.draw(request.rng.random(len(missing)))
            numbers[missing] = request.low + (leaves - request.low) % self._size
            if not (request.consume and self.zero_on_sample):
                break
            # What came up twice is drawn again, now that the first of the two has counted.
            self._tree.set(leaves, 0.0)
            missing = np.delete(missing, np.unique(leaves, return_index=True)[1])
        return numbers

    def taken(self, numbers: Ints, low: int, high: int) -> None:
        """Living items were handed out for training without a draw."""
        if self.zero_on_sample:
            self._catch_up(low, high)
            self._tree.set(numbers % self._size, 0.0)

    def prioritize(self, numbers: Ints, steps: Floats, low: int, high: int) -> None:
        """Set items from the priorities of their steps, `[item, step]`; those that are not living
        are passed over."""
        self._catch_up(low, high)
        mixed = np.zeros(len(steps))
        if self.max_fraction > 0:
            mixed += self.max_fraction * steps.max(1)
        if self.max_fraction < 1:
            mixed += (1 - self.max_fraction) * steps.mean(1)
        living = (numbers >= low) & (numbers < high)
        self._tree.set(numbers[living] % self._size, mixed[living] ** self.exponent)

    def _catch_up(self, low: int, high: int) -> None:
        """Clear items that left and give new ones the initial priority.

        Done when somebody asks rather than at every insert: many inserts are then one change.
        """
        for first, last, weight in (
            (max(self._low, low - self._size), low, 0.0),
            (max(self._high, low), high, self.initial**self.exponent),
        ):
            if last > first:
                self._tree.set(np.arange(first, last) % self._size, weight)
        self._low, self._high = low, high


class Mixture(SimpleSelector):
    """Each draw comes from one of several selectors, with the given probabilities."""

    def __init__(self, *parts: tuple[Selector, float]) -> None:
        fractions = np.array([fraction for _, fraction in parts], np.float64)
        if not len(parts) or not (fractions >= 0).all() or not np.isclose(fractions.sum(), 1.0):
            raise ConfigError(
                "The fractions of a Mixture are not negative and add up to 1: "
                f"{fractions.tolist()} do not."
            )
        self.parts = [selector for selector, _ in parts]
        self.fractions = fractions / fractions.sum()

    @property
    def prioritized(self) -> Sequence[Prioritized]:
        return [leaf for part in self.parts for leaf in part.prioritized]

    def bind(self, size: int) -> None:
        for part in self.parts:
            part.bind(size)

    def draw(self, request: Draw) -> Ints:
        choice = request.rng.choice(len(self.parts), request.count, p=self.fractions)
        numbers = np.empty(request.count, np.int64)
        for which, part in enumerate(self.parts):
            mine = np.flatnonzero(choice == which)
            if len(mine):
                numbers[mine] = part.draw(replace(request, count=len(mine)))
        return numbers

    def save(self) -> dict[str, int]:
        return {
            f"{which}/{key}": value
            for which, part in enumerate(self.parts)
            for key, value in part.save().items()
        }

    def load(self, state: Mapping[str, int], shift: int) -> None:
        for which, part in enumerate(self.parts):
            prefix = f"{which}/"
            mine = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            part.load(mine, shift)
