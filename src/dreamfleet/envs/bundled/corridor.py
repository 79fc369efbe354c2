"""What was seen at the start decides whether to open the door at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.spaces import Space


class Corridor(EpisodicEnv):
    """A test of memory.

    The first observation shows what lies behind the door at the end, a treasure (1) or a trap
    (-1); after it the signal is 0. The agent walks `length` steps by itself and then opens the door
    (1) or leaves it shut (0): +2 for a treasure, -2 for a trap, 0 for a door left shut. What is
    seen at the end is the same in both cases, so whoever acts on the current observation alone
    scores at most 0 on average, and whoever remembers scores 1.
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
        self._treasure = 0
        self._position = 0

    def _begin(self) -> Arrays:
        self._treasure = int(self._rng.integers(2))
        self._position = 0
        return self._see(signal=2 * self._treasure - 1)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._position += 1
        if self._position <= self._length:
            return Outcome(self._see())
        behind = 2.0 if self._treasure else -2.0
        reward = behind if int(action["action"]) else 0.0
        return Outcome(self._see(), reward, last=True, terminal=True)

    def _see(self, signal: int = 0) -> Arrays:
        return {
            "signal": np.array(signal, np.float32),
            "position": np.array(min(self._position / self._length, 1), np.float32),
        }

    def render(self) -> NDArray[np.uint8]:
        cells = np.full((3, self._length + 1, 3), 32, np.uint8)
        cells[1] = 96
        cells[1, -1] = (80, 200, 120) if self._treasure else (200, 60, 60)
        cells[1, min(self._position, self._length)] = (255, 196, 61)
        return cells.repeat(8, 0).repeat(8, 1)
