"""Weights with fast totals: change some, draw in proportion, both in O(log n).

The tree is wide (128 children a node) rather than binary: a level is then one vectorised step over
the whole batch, and three levels cover two million weights. Sums are always recomputed from the
children, never adjusted, so they do not drift.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WIDTH = 128
Floats = NDArray[np.float64]


class SumTree:
    """`size` weights, all zero at first."""

    def __init__(self, size: int) -> None:
        self._levels: list[Floats] = []
        while True:
            blocks = -(-size // _WIDTH)
            self._levels.append(np.zeros((blocks, _WIDTH)))
            if blocks == 1:
                break
            size = blocks

    @property
    def total(self) -> float:
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def set(self, leaves: NDArray[np.int64], weights: Floats | float) -> None:
        self._levels[0].reshape(-1)[leaves] = weights
        blocks = _distinct(leaves // _WIDTH)
        for lower, upper in pairwise(self._levels):
            upper.reshape(-1)[blocks] = lower[blocks].sum(1)
            blocks = _distinct(blocks // _WIDTH)

    def draw(self, fractions: Floats) -> NDArray[np.int64]:
        """The leaf at each fraction in [0, 1) of the total; never one of weight zero."""
        rest = fractions * self.total
        nodes = np.zeros(len(fractions), np.int64)
        rows = np.arange(len(fractions))
        for level in reversed(self._levels):
            sums = np.cumsum(level[nodes], 1)
            # Rounding may leave a rest beyond the end of a block.
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            # The first sum above the rest is there because of its own weight, which is not zero.
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
