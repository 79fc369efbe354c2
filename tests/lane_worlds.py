"""Vectorised environments of every autoreset mode, importable by environment processes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

LENGTH = 6


class Count(gymnasium.Env[Any, Any]):
    """Observes its seed and the numbers of episode and step; lanes end at different times."""

    observation_space = spaces.Box(0, 1e6, (3,), np.float32)
    action_space = spaces.Discrete(3)
    _episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        if seed is not None:
            self._length, self._id = LENGTH + seed % 3, seed % 65_521
        self._episode, self._step = self._episode + 1, 0
        return np.array([self._id, self._episode, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        obs = np.array([self._id, self._episode, self._step], np.float32)
        return obs, 1.0, self._step == self._length, False, {}


def next_step(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Count] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def same_step(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Count] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def disabled(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Count] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
