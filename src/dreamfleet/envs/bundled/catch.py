"""A ball falls, a paddle catches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.spaces import Space

_BACKGROUND, _BALL, _PADDLE = (16, 20, 32), (255, 196, 61), (88, 196, 255)


class Catch(EpisodicEnv):
    """A pixel game on a small grid: left, stay, right; +1 for a ball caught, -1 for one missed.

    An episode drops `balls` balls, one after the other. Random play scores about -0.6 a ball,
    perfect play 1.
    """

    def __init__(
        self, *, seed: int = 0, grid: int = 8, balls: int = 1, size: tuple[int, int] = (64, 64)
    ) -> None:
        super().__init__(
            {"image": Space(np.uint8, (*size, 3))}, {"action": Space(np.int32, (), 0, 3)}
        )
        self._rng = np.random.default_rng(seed)
        self._grid = grid
        self._balls = balls
        # Where each cell of the grid starts in the image, the end included.
        self._rows = np.linspace(0, size[0], grid + 1).round().astype(int)
        self._columns = np.linspace(0, size[1], grid + 1).round().astype(int)
        self._empty = np.full((*size, 3), _BACKGROUND, np.uint8)
        self._ball = (0, 0)
        self._paddle = 0
        self._left = 0

    def _begin(self) -> Arrays:
        self._left = self._balls
        self._paddle = self._grid // 2
        self._drop()
        return {"image": self._draw()}

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._paddle = min(max(self._paddle + int(action["action"]) - 1, 0), self._grid - 1)
        row, column = self._ball
        self._ball = (row + 1, column)
        reward = 0.0
        if row + 1 == self._grid - 1:
            reward = 1.0 if column == self._paddle else -1.0
            self._left -= 1
            if self._left:
                self._drop()
        over = self._left == 0
        return Outcome({"image": self._draw()}, reward, over, over)

    def _drop(self) -> None:
        self._ball = (0, int(self._rng.integers(self._grid)))

    def _draw(self) -> NDArray[np.uint8]:
        image = self._empty.copy()
        self._fill(image, self._grid - 1, self._paddle, _PADDLE)
        self._fill(image, *self._ball, _BALL)
        return image

    def _fill(
        self, image: NDArray[np.uint8], row: int, column: int, color: tuple[int, int, int]
    ) -> None:
        top, bottom = self._rows[row : row + 2]
        left, right = self._columns[column : column + 2]
        image[top:bottom, left:right] = color

    def render(self) -> NDArray[np.uint8]:
        return self._draw()
