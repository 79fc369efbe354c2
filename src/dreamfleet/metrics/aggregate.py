"""Many values of one key become their mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dreamfleet.metrics.outputs.base import is_numeric


class Aggregate:
    """Collects metrics until `result` is called.

    A number, or each number of an array with one dimension, counts towards the mean of its key.
    Of anything else (images, videos, text) the newest value of each key is kept.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._newest: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Add a value of some keys."""
        for name, value in metrics.items():
            key = f"{prefix}/{name}" if prefix else name
            if isinstance(value, (int, float)):
                self._count(key, value, 1)
                continue
            array = np.asarray(value)
            if array.ndim > 1 or not is_numeric(array.dtype):
                self._newest[key] = value
            elif array.size:
                self._count(key, float(array.astype(np.float64).sum()), array.size)

    def _count(self, key: str, total: float, size: int) -> None:
        before, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = before + total, count + size

    def result(self, prefix: str = "") -> dict[str, Any]:
        """One value for each key, and start from nothing. A key without a value is left out."""
        result = self._newest | {key: total / size for key, (total, size) in self._sums.items()}
        self._sums, self._newest = {}, {}
        return {f"{prefix}/{key}": value for key, value in result.items()} if prefix else result
