"""Which sequences a batch is made of.

A selector draws item numbers from the living range `[low, high)`: `high - 1` is the newest item.
Items are only ever added at the high end and removed at the low end, so a removed item can never
be drawn. A draw that does not consume (report, eval) leaves the selector as it was.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError
from dreamfleet.replay.config import ReplayConfig
from dreamfleet.replay.storage.store import Ints, Piece
from dreamfleet.replay.table import SLACK, Table

Floats = NDArray[np.float64]
_NO_ITEM = -1
_LARGEST = np.finfo(np.float32).max


def used_fractions(config: ReplayConfig) -> list[float]:
    """The fractions of the rules that a run uses, in the order of its selector's `parts`."""
    fractions = config.fractions
    return [f for f in (fractions.uniform, fractions.priority, fractions.recency) if f > 0]


def make_selector(config: ReplayConfig) -> Selector:
    """The selector that a run's settings describe."""
    priority = config.priority
    parts: list[tuple[float, Selector]] = [
        (config.fractions.uniform, Uniform()),
        (
            config.fractions.priority,
            Prioritized(
                priority.exponent,
                priority.max_fraction,
                math.inf if priority.initial is None else priority.initial,
                priority.zero_on_sample,
            ),
        ),
        (config.fractions.recency, Recency(config.recency_exponent)),
    ]
    used = [(selector, fraction) for fraction, selector in parts if fraction > 0]
    return used[0][0] if len(used) == 1 else Mixture(*used)


@dataclass(frozen=True)
class Draw:
    """A request for items; there is at least one living item."""

    rng: np.random.Generator
    count: int
    low: int
    high: int
    consume: bool
    everywhere: int = 0
    """Living items here and in the replays that this one is drawn from together with; 0 if it is
    alone."""


class Selector(ABC):
    """How items are chosen. Most subclasses only need `draw`."""

    @property
    def parts(self) -> Sequence[Selector]:
        """The rules by which items are chosen; this one alone, unless it is a mixture."""
        return [self]

    def weight(self, low: int, high: int) -> float:
        """What all living items weigh together, next to those of another replay."""
        return float(high - low)

    @abstractmethod
    def draw(self, request: Draw) -> Ints:
        """As many item numbers as requested, possibly with repeats."""

    def bind(self, table: Table) -> None:  # noqa: B027 - optional
        """Called once, before anything else, with the steps and items of the replay."""

    @property
    def prioritized(self) -> Prioritized | None:
        """The selector in this one that follows priorities."""
        return None


class Uniform(Selector):
    """Every living item is equally likely."""

    def draw(self, request: Draw) -> Ints:
        return request.rng.integers(request.low, request.high, request.count)


class Recency(Selector):
    """An item with n newer ones has the weight `1 / (n + 1) ** exponent`.

    Of several replays that are drawn from together, each takes its items to be spread evenly over
    all of them.
    """

    def __init__(self, exponent: float = 1.0) -> None:
        if not 0 <= exponent < np.inf:
            raise ConfigError(f"Recency needs a finite exponent of at least 0, not {exponent}.")
        self.exponent = exponent
        self._sums = np.zeros(0)

    def draw(self, request: Draw) -> Ints:
        living = request.high - request.low
        every = max(living, request.everywhere)
        if every > len(self._sums):
            ages = np.arange(max(1024, 2 * every), dtype=np.float64)
            self._sums = np.cumsum((ages + 1) ** -self.exponent)
        targets = request.rng.random(request.count) * self._sums[every - 1]
        ages = np.searchsorted(self._sums[:every], targets, side="right")
        if every > living:
            ages = ages * living // every
        return np.asarray(request.high - 1 - np.minimum(ages, living - 1), np.int64)


class Mixture(Selector):
    """Each draw comes from one of several selectors, with the given probabilities."""

    def __init__(self, *parts: tuple[Selector, float]) -> None:
        fractions = np.array([fraction for _, fraction in parts], np.float64)
        if not len(parts) or not (fractions >= 0).all() or not np.isclose(fractions.sum(), 1.0):
            raise ConfigError(
                "The fractions of a Mixture are not negative and add up to 1: "
                f"{fractions.tolist()} do not."
            )
        self._parts = [selector for selector, _ in parts]
        self.fractions = fractions / fractions.sum()
        if sum(part.prioritized is not None for part in self._parts) > 1:
            raise ConfigError("A Mixture can hold one Prioritized, not several.")

    @property
    def parts(self) -> Sequence[Selector]:
        return self._parts

    @property
    def prioritized(self) -> Prioritized | None:
        return next((part.prioritized for part in self._parts if part.prioritized), None)

    def bind(self, table: Table) -> None:
        for part in self.parts:
            part.bind(table)

    def draw(self, request: Draw) -> Ints:
        choice = request.rng.choice(len(self.parts), request.count, p=self.fractions)
        numbers = np.empty(request.count, np.int64)
        for which, part in enumerate(self.parts):
            mine = np.flatnonzero(choice == which)
            if len(mine):
                numbers[mine] = part.draw(replace(request, count=len(mine)))
        return numbers


class Prioritized(Selector):
    """In proportion to weights that follow from the priorities p of an item's steps:

        max_fraction * max(p ** exponent) + (1 - max_fraction) * mean(p ** exponent)

    A step that was never trained on has the priority `initial`. If that is infinite, items with
    such a step are drawn before all others, each of them equally likely. `Replay.update` sets the
    priorities of steps, which changes every item that holds one of them. With `zero_on_sample` the
    steps of an item that is sampled for training get the priority 0. When all weights are 0 the
    draw is uniform. Priorities are not stored: after a restart every step has the initial one.
    """

    def __init__(
        self,
        exponent: float = 0.8,
        max_fraction: float = 0.5,
        initial: float = math.inf,
        zero_on_sample: bool = True,
    ) -> None:
        if not (0 <= exponent < np.inf and initial >= 0 and 0 <= max_fraction <= 1):
            raise ConfigError(
                "Prioritized needs a finite exponent >= 0, max_fraction between 0 and 1 and "
                f"initial >= 0, not {exponent}, {max_fraction} and {initial}."
            )
        self.exponent = exponent
        self.max_fraction = max_fraction
        self.initial = initial
        self.zero_on_sample = zero_on_sample

    @property
    def prioritized(self) -> Prioritized:
        return self

    def bind(self, table: Table) -> None:
        self._table, self._store, self._length = table, table.store, table.length
        self._size = table.capacity + SLACK
        self._tree = SumTree(self._size)
        self._initial = math.inf
        if self.initial < math.inf or self.exponent == 0:
            self._initial = float(_powers(np.array([self.initial]), self.exponent)[0])
        positions = self._store.slots * self._store.steps
        # Zeroed pages take memory only once they are written.
        self._values = np.zeros(positions, np.float32)
        self._numbers = np.zeros(positions, np.int64)
        self._any_set = False
        self._low = self._high = 0

    def weight(self, low: int, high: int) -> float:  # noqa: ARG002 - those of the items
        self._catch_up()
        return self._tree.total

    def index_bytes(self, chunks: int) -> int:
        """Memory used with that many chunks."""
        each = self._values.itemsize + self._numbers.itemsize
        return chunks * self._store.steps * each + self._tree.nbytes

    def draw(self, request: Draw) -> Ints:
        self._catch_up()
        zeroing = request.consume and self.zero_on_sample
        drawn = []
        for count in [1] * request.count if zeroing else [request.count]:
            if self._tree.total > 0:
                leaves = self._tree.draw(request.rng.random(count))
                drawn.append(request.low + (leaves - request.low) % self._size)
                if zeroing:  # the next draw sees these steps at 0
                    self.taken(drawn[-1])
            else:
                drawn.append(request.rng.integers(request.low, request.high, count))
        return np.concatenate(drawn)

    def taken(self, numbers: Ints) -> None:
        """Living items were sampled for training."""
        if self.zero_on_sample:
            self._catch_up()
            pieces = self._store.pieces(*self._table.starts(numbers), self._length)
            self._set(pieces, 0.0)

    def created(self, slot: int) -> None:
        """A chunk begins in a slot that another may have used before."""
        chunk = slice(slot * self._store.steps, (slot + 1) * self._store.steps)
        self._values[chunk] = self._initial
        self._numbers[chunk] = _NO_ITEM

    def started(self, positions: Ints, numbers: Ints) -> None:
        """Items with these numbers start at these steps."""
        self._numbers[positions] = numbers

    def update(self, runs: Sequence[Piece], priorities: NDArray[np.float32]) -> None:
        """Set the priorities of runs of steps; runs with a slot of -1 are passed over."""
        here = [run for run in runs if run.slot >= 0]
        if here:
            self._catch_up()
            self._set(here, _powers(priorities, self.exponent))

    def _set(self, runs: Sequence[Piece], powers: NDArray[np.float32] | float) -> None:
        """Set p ** exponent of runs of steps, and the weights of all living items that hold one."""
        self._any_set = True
        for _, at, slot, start, size in runs:
            first = slot * self._store.steps + start
            self._values[first : first + size] = (
                powers if isinstance(powers, float) else powers[at : at + size]
            )
        # The steps of all items that hold a step of a run, one run after the other.
        reach = self._length - 1
        slots, starts, sizes = np.array([run[2:] for run in runs]).T
        counts = sizes + 2 * reach
        which = np.repeat(np.arange(len(runs)), counts)
        first = starts - reach - np.cumsum(counts) + counts
        at_slots, indices = self._store.walk(slots[which], first[which] + np.arange(len(which)))
        stored = indices < self._store.lengths[at_slots]
        positions, which = (at_slots * self._store.steps + indices)[stored], which[stored]
        if len(positions) < self._length:
            return
        # An item that two runs share comes twice, with the same weight both times.
        windows = sliding_window_view(self._values[positions].astype(np.float64), self._length)
        numbers = self._numbers[positions[: len(windows)]]
        living = (numbers >= self._low) & (numbers < self._high)
        living &= which[: len(windows)] == which[reach:]  # else it reaches into the next run's
        self._tree.set(numbers[living] % self._size, self._weights(windows)[living])

    def _catch_up(self) -> None:
        """Clear items that left and give weights to new ones.

        Done on demand rather than at every insert: many inserts are then one change.
        """
        low, high = self._table.low, self._table.high
        first = max(self._low, low - self._size)
        if low > first:
            self._tree.set(np.arange(first, low) % self._size, 0.0)
        first = max(self._high, low)
        self._low, self._high = low, high
        for start in range(first, high, SLACK):
            numbers = np.arange(start, min(start + SLACK, high))
            weights: Floats | float = self._initial
            if self._any_set:
                steps = self._values[self._positions(numbers)]
                weights = self._weights(steps.astype(np.float64))
            self._tree.set(numbers % self._size, weights)

    def _positions(self, numbers: Ints) -> Ints:
        """Flat positions of the steps of items: `[item, step]`."""
        slots, indices = self._table.starts(numbers)
        slots, indices = self._store.walk(
            np.repeat(slots[:, None], self._length, 1), indices[:, None] + np.arange(self._length)
        )
        return slots * self._store.steps + indices

    def _weights(self, powers: Floats) -> Floats:
        """Weights of items from p ** exponent of their steps, `[item, step]`."""
        weights = np.zeros(len(powers))
        if self.max_fraction > 0:
            weights += self.max_fraction * powers.max(1)
        if self.max_fraction < 1:
            weights += (1 - self.max_fraction) * powers.mean(1)
        return weights


def _powers(priorities: NDArray[np.floating], exponent: float) -> NDArray[np.float32]:
    """p ** exponent of finite priorities, which stay finite."""
    with np.errstate(over="ignore"):
        powers = priorities.astype(np.float64) ** exponent
    return np.minimum(powers, _LARGEST).astype(np.float32)


class SumTree:
    """`size` weights, all zero at first: change some, draw in proportion, both in O(sqrt(size)).

    There are two levels, weights and sums of blocks. Sums are always recomputed from the weights,
    never adjusted, so they do not drift.

    While any weight is infinite, only infinite ones are drawn, all with the same probability. They
    are stored as a number so large that all finite weights together vanish in its rounding: sums of
    infinities are then exact, and nothing becomes NaN.
    """

    _INFINITE = 2.0**500
    # Far above the share of all finite weights next to one infinite weight, far below 1.
    _LEAST_SHARE = 2.0**-100

    def __init__(self, size: int) -> None:
        self._width = math.isqrt(size) + 1
        self._blocks = np.zeros((self._width, self._width))
        self._sums = np.zeros(self._width)

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def set(self, leaves: Ints, weights: Floats | float) -> None:
        """Set weights below 2 ** 300, or infinite ones."""
        self._blocks.reshape(-1)[leaves] = np.minimum(weights, self._INFINITE)
        changed = np.unique(leaves // self._width)
        self._sums[changed] = self._blocks[changed].sum(1)

    def draw(self, fractions: Floats) -> Ints:
        """The leaf at each fraction in [0, 1) of the total; never one of weight zero."""
        sums = np.cumsum(self._sums)
        rest = self._clip(fractions * sums[-1], sums[-1])
        blocks: Ints = np.searchsorted(sums, rest, side="right")
        rest -= np.append(0.0, sums)[blocks]
        sums = np.cumsum(self._blocks[blocks], 1)
        rest = self._clip(rest, sums[:, -1])
        leaves: Ints = blocks * self._width + np.argmax(sums > rest[:, None], 1)
        return leaves

    def _clip(self, rest: Floats, total: Floats) -> Floats:
        # Rounding may leave a rest beyond the end; the first sum above a rest is there because of
        # its own weight, which therefore is not zero. A rest of 0 would lead to a finite weight
        # that comes before the infinite ones.
        return np.clip(rest, total * self._LEAST_SHARE, np.nextafter(total, 0.0))
