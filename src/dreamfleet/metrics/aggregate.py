"""Many values of one key become a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.errors import ConfigError
from dreamfleet.metrics.outputs.base import is_numeric

Reduction = Literal["mean", "max", "min", "sum", "last", "std"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "max", "min", "sum", "last", "std")


class _Key:
    """Running moments: nothing is kept but what the reductions need."""

    __slots__ = ("count", "last", "low", "mean", "peak", "squares", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared distances from the mean
        self.peak = -math.inf
        self.low = math.inf
        self.last = math.nan

    def add_one(self, value: float) -> None:
        # Welford: stable where the sum of squares minus the square of the sum is not.
        self.count += 1
        self.total += value
        off = value - self.mean
        self.mean += off / self.count
        self.squares += off * (value - self.mean)
        # NaN compares false: without the last test it would vanish from the extremes.
        if value > self.peak or value != value:
            self.peak = value
        if value < self.low or value != value:
            self.low = value
        self.last = value

    def add_many(self, values: NDArray[np.float64]) -> None:
        size = values.size
        mean = float(values.mean())
        off = mean - self.mean
        count = self.count + size
        self.squares += float(((values - mean) ** 2).sum()) + off * off * self.count * size / count
        self.mean += off * size / count
        self.count = count
        self.total += float(values.sum())
        self.peak = float(np.maximum(self.peak, values.max()))
        self.low = float(np.minimum(self.low, values.min()))
        self.last = float(values[-1])

    def reduce(self, how: Reduction) -> float:
        if how == "mean":
            return self.total / self.count
        if how == "sum":
            return self.total
        if how == "max":
            return self.peak
        if how == "min":
            return self.low
        if how == "last":
            return self.last
        return math.sqrt(self.squares / self.count)


class Aggregate:
    """Collects metrics until `result` is asked for.

    A number, or an array of numbers with at most one dimension, is reduced over all values of
    its key; "mean" keeps the key's name, any other reduction adds its own (`loss/max`), unless
    it is the only one. Anything else (histograms given as `last`, images, videos, text) is kept
    as it is, the newest of each key.

    Not thread-safe: one thread adds and asks.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._how: dict[str, tuple[Reduction, ...]] = {}
        self._newest: dict[str, Any] = {}

    def add(
        self,
        metrics: Mapping[str, Any],
        how: Reduction | tuple[Reduction, ...] = "mean",
        prefix: str = "",
    ) -> None:
        """Add the values of some keys, to be reduced in the given way or ways."""
        ways = (how,) if isinstance(how, str) else how
        if not ways or not set(ways) <= set(REDUCTIONS):
            raise ConfigError(f"{how!r} is no way to reduce: choose from {', '.join(REDUCTIONS)}.")
        for name, value in metrics.items():
            key = f"{prefix}/{name}" if prefix else name
            if isinstance(value, (int, float)):
                self._entry(key, ways).add_one(value)
                continue
            if isinstance(value, str):
                self._newest[key] = value
                continue
            array = np.asarray(value)
            if array.ndim > 1 or not is_numeric(array.dtype):
                self._newest[key] = value
            elif array.ndim == 0:
                self._entry(key, ways).add_one(float(array))
            elif array.size:
                self._entry(key, ways).add_many(array.astype(np.float64))

    def _entry(self, key: str, ways: tuple[Reduction, ...]) -> _Key:
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key()
            self._how[key] = ways
        elif self._how[key] != ways:
            self._how[key] = tuple(dict.fromkeys(self._how[key] + ways))
        return entry

    def keep(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Keep values as they are, the newest of each key: histograms, images, videos, text."""
        for name, value in metrics.items():
            self._newest[f"{prefix}/{name}" if prefix else name] = value

    def result(self, *, reset: bool = True, prefix: str = "") -> dict[str, Any]:
        """One value for each key and reduction; a key nothing was added to is not there."""
        result: dict[str, Any] = dict(self._newest)
        for key, entry in self._keys.items():
            ways = self._how[key]
            for way in ways:
                plain = way == "mean" or len(ways) == 1
                result[key if plain else f"{key}/{way}"] = entry.reduce(way)
        if reset:
            self._keys.clear()
            self._how.clear()
            self._newest.clear()
        return {f"{prefix}/{key}": value for key, value in result.items()} if prefix else result
