"""An environment that forbids actions, and raises when a forbidden one is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dreamfleet import Space
from dreamfleet.envs import EpisodicEnv, Outcome
from dreamfleet.envs.base import Arrays

DOORS = 5
LENGTH = 8


class Doors(EpisodicEnv):
    """Two of five doors are open, which ones depends on the room; the last room has none."""

    tried: ClassVar[list[int]] = []
    """Closed doors that were tried in this process: a fleet forgives an environment that raises."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(
            {"room": Space(np.int32, (), 0, DOORS), "action_mask": Space(np.int8, (DOORS,), 0, 2)},
            {"door": Space(np.int32, (), 0, DOORS)},
        )
        self._rng = np.random.default_rng(seed)
        self._room = self._rooms = 0

    def _begin(self) -> Arrays:
        self._rooms = 0
        return self._enter()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        door = int(action["door"])
        if not doors_of(self._room)[door]:
            self.tried.append(door)
            raise RuntimeError(f"door {door} is closed in room {self._room}")
        self._rooms += 1
        last = self._rooms == LENGTH
        obs = self._enter()
        if last:
            obs["action_mask"] = np.zeros(DOORS, np.int8)
        return Outcome(obs, float(door == 0), last, last)

    def _enter(self) -> Arrays:
        self._room = int(self._rng.integers(DOORS))
        return {"room": np.array(self._room, np.int32), "action_mask": doors_of(self._room)}


def doors_of(room: int) -> np.ndarray:
    """The mask of a room: its own door and the one after the next."""
    return np.isin(np.arange(DOORS), (room, (room + 2) % DOORS)).astype(np.int8)
