"""Weights with fast totals: change some, draw in proportion, both in O(log n).

The tree is wide rather than binary: a level is then one vectorised step over the whole batch, and
two levels of blocks below the root cover two million weights. Not wider: a draw adds up the root
and one block a level for each of its targets. Sums are always recomputed from the children, never
adjusted, so they do not drift.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WIDTH = 128
_ROOT = 512
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
        sums = _sums(self._root)
        # Rounding may leave a rest beyond the end; the first sum above a rest is there because of
        # its own weight, which therefore is not zero. The same holds on every level.
        rest = np.minimum(fractions * sums[-1], np.nextafter(sums[-1], 0.0))
        nodes: NDArray[np.int64] = np.searchsorted(sums[1:], rest, side="right")
        rest -= sums[nodes]
        rows = np.arange(len(fractions))
        for level in reversed(self._levels):
            sums = _sums(level[nodes])
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            child = np.argmax(sums[:, 1:] > rest[:, None], 1)
            rest -= sums[rows, child]
            nodes = nodes * _WIDTH + child
        return nodes


def _sums(weights: Floats) -> Floats:
    """What lies before each weight of the last axis, and the total."""
    sums = np.zeros((*weights.shape[:-1], weights.shape[-1] + 1))
    np.cumsum(weights, -1, out=sums[..., 1:])
    return sums


def _distinct(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without those that come again at once: most do, and the sum of one may be taken twice."""
    new = np.ones(len(blocks), np.bool_)
    np.not_equal(blocks[1:], blocks[:-1], out=new[1:])
    return blocks[new]
