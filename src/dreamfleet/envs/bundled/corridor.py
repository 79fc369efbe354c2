"""A signal at the start decides which way to turn at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.spaces import Space

_PRIZES, _MISTAKE = (1.0, 2.0), -1.0


class Corridor(EpisodicEnv):
    """A test of memory, after the T-maze.

    The first observation shows a signal, left (-1) or right (1); after it the signal is 0. The
    agent walks `length` steps by itself and then turns: -1 for the wrong side, and for the
    signalled one +1 on the left and +2 on the right. What is seen at the end is the same in both
    cases, so whoever acts on the current observation alone scores at most 0.5 on average, by always
    turning right, and whoever remembers scores 1.5.

    The two prizes differ on purpose: were they equal, then neither the signal nor the turn alone
    would tell anything about the reward, and there would be no slope to learn along.
    """

    def __init__(self, *, seed: int = 0, length: int = 10) -> None:
        super().__init__(
            {
                "signal": Space(np.float32, (), -1, 1),
                "position": Space(np.float32, (), 0, 1),
            },
            {"action": Space(np.int32, (), 0, 2)},
        )
        self._rng = np.random.default_rng(seed)
        self._length = length
        self._side = 0
        self._position = 0

    def _begin(self) -> Arrays:
        self._side = int(self._rng.integers(2))
        self._position = 0
        return self._see(signal=2 * self._side - 1)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._position += 1
        if self._position <= self._length:
            return Outcome(self._see())
        found = int(action["action"]) == self._side
        reward = _PRIZES[self._side] if found else _MISTAKE
        return Outcome(self._see(), reward, last=True, terminal=True)

    def _see(self, signal: int = 0) -> Arrays:
        return {
            "signal": np.array(signal, np.float32),
            "position": np.array(min(self._position / self._length, 1), np.float32),
        }

    def render(self) -> NDArray[np.uint8]:
        cells = np.full((3, self._length + 1, 3), 32, np.uint8)
        cells[1] = 96
        cells[:, -1] = 96
        cells[2 if self._side else 0, -1] = (80, 200, 120)
        cells[1, min(self._position, self._length)] = (255, 196, 61)
        return cells.repeat(8, 0).repeat(8, 1)
