"""Weights with fast totals: change some, draw in proportion, both in O(log n).

The tree is wide rather than binary: a level is then one vectorised step over the whole batch, and
the root with one level of blocks below it covers two million weights. Sums are always recomputed
from the children, never adjusted, so they do not drift.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WIDTH = 256
_ROOT = 8192
Floats = NDArray[np.float64]


class SumTree:
    """`size` weights, all zero at first."""

    def __init__(self, size: int) -> None:
        self._levels: list[Floats] = []
        while not self._levels or size > _ROOT:
            size = -(-size // _WIDTH)
            self._levels.append(np.zeros((size, _WIDTH)))
        self._root = np.zeros(size)

    @property
    def total(self) -> float:
        return float(self._root.sum())

    @property
    def nbytes(self) -> int:
        return self._root.nbytes + sum(level.nbytes for level in self._levels)

    def set(self, leaves: NDArray[np.int64], weights: Floats | float) -> None:
        self._levels[0].reshape(-1)[leaves] = weights
        for lower, upper in pairwise([*self._levels, self._root]):
            leaves = _distinct(leaves // _WIDTH)
            upper.reshape(-1)[leaves] = lower[leaves].sum(1)

    def draw(self, fractions: Floats) -> NDArray[np.int64]:
        """The leaf at each fraction in [0, 1) of the total; never one of weight zero."""
        sums = np.cumsum(self._root)
        # Rounding may leave a rest beyond the end; the first sum above a rest is there because of
        # its own weight, which therefore is not zero. The same holds on every level.
        rest = np.minimum(fractions * sums[-1], np.nextafter(sums[-1], 0.0))
        nodes: NDArray[np.int64] = np.searchsorted(sums, rest, side="right")
        rest = rest - np.where(nodes > 0, sums[nodes - 1], 0.0)
        rows = np.arange(len(fractions))
        for level in reversed(self._levels):
            sums = np.cumsum(level[nodes], 1)
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            child = np.argmax(sums > rest[:, None], 1)
            rest = rest - np.where(child > 0, sums[rows, child - 1], 0.0)
            nodes = nodes * _WIDTH + child
        return nodes


def _distinct(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different ones; far cheaper than sorting where there are many beside each other."""
    if not len(blocks):
        return blocks
    low = int(blocks.min())
    there = np.zeros(int(blocks.max()) - low + 1, np.bool_)
    there[blocks - low] = True
    return low + np.flatnonzero(there)
