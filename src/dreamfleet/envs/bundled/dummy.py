"""The environment of the benchmarks: nearly free to step, and easy to audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, EpisodicEnv, Outcome
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import Space

_FRAMES = 8


class Dummy(EpisodicEnv):
    """Fixed noise frames and a vector that says where the step came from.

    `vector` begins with the seed, the episode (from 0) and the step (from 0), so that whoever
    gives each environment its own seed can tell any stored step apart and find what was lost,
    doubled or reordered. `count` holds the step as an integer. The reward is 1 on every tenth
    step. Frames come from a small pool and are read-only views of it: stepping copies nothing.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        size: tuple[int, int] = (64, 64),
        channels: int = 3,
        vector: int = 8,
        length: int = 100,
        actions: Literal["discrete", "continuous", "both"] = "discrete",
        terminal: bool = False,
    ) -> None:
        if vector < 3 or length < 1:
            raise ConfigError(
                f"The dummy needs vector >= 3 (seed, episode, step) and length >= 1, got vector="
                f"{vector} and length={length}."
            )
        act_space = {}
        if actions in ("discrete", "both"):
            act_space["action"] = Space(np.int32, (), 0, 5)
        if actions in ("continuous", "both"):
            act_space["force"] = Space(np.float32, (6,), -1, 1)
        super().__init__(
            {
                "image": Space(np.uint8, (*size, channels)),
                "vector": Space(np.float32, (vector,)),
                "count": Space(np.int32, (), 0, length + 1),
                "log/step": Space(np.float32),
            },
            act_space,
        )
        noise = np.random.default_rng(seed).integers(0, 256, (_FRAMES, *size, channels), np.uint8)
        noise.setflags(write=False)
        self._frames = list(noise)
        self._origin = np.zeros(vector, np.float32)
        self._origin[0] = seed
        self._length = length
        self._terminal = terminal
        self._episode = -1
        self._step = 0

    def _begin(self) -> Arrays:
        self._episode += 1
        self._step = 0
        return self._see()

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        del action
        self._step += 1
        last = self._step >= self._length
        reward = 1.0 if self._step % 10 == 0 else 0.0
        return Outcome(self._see(), reward, last, last and self._terminal)

    def _see(self) -> Arrays:
        vector = self._origin.copy()
        vector[1] = self._episode
        vector[2] = self._step
        return {
            "image": self._frames[self._step % _FRAMES],
            "vector": vector,
            "count": np.array(self._step, np.int32),
            "log/step": vector[2:3].reshape(()),
        }

    def render(self) -> NDArray[np.uint8]:
        frame: NDArray[np.uint8] = self._frames[self._step % _FRAMES]
        return frame
