"""The environment of runs that are audited: `--task chaos.env:Audit`."""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.spaces import Space

TASK = f"{__name__}:Audit"
_EXACT = 1 << 24  # float32 holds all whole numbers below


class Audit(EpisodicEnv):
    """Says in each observation where it comes from.

    `record` holds whole numbers, in the order of `FIELDS`: the environment (its seed), the life
    (drawn by each instance), the episode of this life and the step of this episode (from 0), the
    last action (-1 at the start of an episode), the steps of the episode before, and a checksum of
    all of these. `chaos.audit` reads them back. A step takes `seconds`.
    """

    FIELDS = ("environment", "life", "episode", "step", "action", "before", "checksum")

    def __init__(self, *, seed: int = 0, length: int = 25, seconds: float = 0.0) -> None:
        super().__init__(
            {"record": Space(np.float32, (len(self.FIELDS),))},
            {"action": Space(np.int32, (), 0, 5)},
        )
        self._environment, self._life = seed % _EXACT, secrets.randbelow(_EXACT)
        self._length, self._seconds = length, seconds
        self._episode, self._step, self._before = -1, 0, 0

    def _begin(self) -> Arrays:
        self._episode += 1
        self._before, self._step = self._step, 0
        return self._observe(-1)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self._step += 1
        time.sleep(self._seconds)
        reward = 1.0 if self._step % 10 == 0 else 0.0
        return Outcome(self._observe(int(action["action"])), reward, self._step >= self._length)

    def _observe(self, action: int) -> Arrays:
        life = self._environment, self._life
        fields = (*life, self._episode % _EXACT, self._step, action, self._before)
        return {"record": np.array([*fields, self.checksum(fields)], np.float32)}

    @staticmethod
    def checksum(fields: Sequence[int]) -> int:
        """Of all other fields."""
        return zlib.crc32(np.array(fields, np.int32).tobytes()) % _EXACT
