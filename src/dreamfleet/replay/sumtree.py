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
        blocks = np.unique(leaves // _WIDTH)
        for lower, upper in pairwise(self._levels):
            upper.reshape(-1)[blocks] = lower[blocks].sum(1)
            blocks = np.unique(blocks // _WIDTH)

    def draw(self, fractions: Floats) -> NDArray[np.int64]:
        """The leaf at each fraction in [0, 1) of the total; never one of weight zero."""
        rest = fractions * self.total
        nodes = np.zeros(len(fractions), np.int64)
        for level in reversed(self._levels):
            weights = level[nodes]
            sums = np.cumsum(weights, 1)
            # Rounding may leave a rest beyond the last positive weight of a block.
            last = _WIDTH - 1 - np.argmax(weights[:, ::-1] > 0, 1)
            child = np.minimum((sums <= rest[:, None]).sum(1), last)
            rows = np.arange(len(nodes))
            rest = np.maximum(rest - (sums[rows, child] - weights[rows, child]), 0.0)
            nodes = nodes * _WIDTH + child
        return nodes
