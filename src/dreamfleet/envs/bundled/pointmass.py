"""A mass on a plane, pushed to a goal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.spaces import Space

_DRAG = 0.9
_PUSH = 0.02


class PointMass(EpisodicEnv):
    """Two continuous actions push a point towards a goal that is elsewhere in each episode.

    The reward of a step is 1 at the goal and falls off with the distance (a Gaussian of width
    0.25), so an episode of `length` steps scores at most `length`. Episodes end by the clock,
    which is last but not terminal.
    """

    def __init__(self, *, seed: int = 0, length: int = 100) -> None:
        super().__init__(
            {
                "position": Space(np.float32, (2,), -1, 1),
                "velocity": Space(np.float32, (2,), -1, 1),
                "goal": Space(np.float32, (2,), -1, 1),
            },
            {"action": Space(np.float32, (2,), -1, 1)},
        )
        self._rng = np.random.default_rng(seed)
        self._length = length
        self._taken = 0
        self._position = self._velocity = self._goal = np.zeros(2)

    def _begin(self) -> Arrays:
        self._taken = 0
        self._position, self._goal = self._rng.uniform(-0.8, 0.8, (2, 2))
        self._velocity = np.zeros(2)
        return self._see()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._taken += 1
        push = np.clip(action["action"], -1, 1)
        velocity = _DRAG * self._velocity + _PUSH * push
        self._position = np.clip(self._position + velocity, -1, 1)
        # A wall takes the speed that pointed into it.
        self._velocity = np.where(np.abs(self._position) < 1, velocity, 0)
        distance = np.linalg.norm(self._position - self._goal)
        reward = float(np.exp(-0.5 * (distance / 0.25) ** 2))
        return Outcome(self._see(), reward, last=self._taken >= self._length)

    def _see(self) -> Arrays:
        return {
            "position": self._position.astype(np.float32),
            "velocity": self._velocity.astype(np.float32),
            "goal": self._goal.astype(np.float32),
        }

    def render(self) -> NDArray[np.uint8]:
        image = np.full((64, 64, 3), 24, np.uint8)
        for place, color in ((self._goal, (80, 200, 120)), (self._position, (255, 196, 61))):
            x, y = ((place + 1) / 2 * 59 + 2).round().astype(int)
            image[y - 2 : y + 3, x - 2 : x + 3] = color
        return image
