"""Action masks that a Gymnasium environment returns in `info` instead of its observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dreamfleet.masks import ACTION_MASK
from dreamfleet.spaces import SpaceError


class MaskFromInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds `info["action_mask"]` to the observations, under the same key.

    The parts of a mask for MultiDiscrete are joined. The last step of an episode needs no mask,
    because no action follows.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        inner, action = env.observation_space, env.action_space
        if isinstance(action, spaces.Discrete):
            self._choices = int(action.n)
        elif isinstance(action, spaces.MultiDiscrete):
            self._choices = int(action.nvec.sum())
        elif isinstance(action, spaces.MultiBinary):
            self._choices = 2 * int(np.prod(action.shape))
        else:
            raise SpaceError(
                f"A mask is for discrete actions, and the action space is {action}: leave the "
                "mask out."
            )
        self._key = "" if isinstance(inner, spaces.Dict) else "vector"
        if len(inner.shape or ()) == 3:
            self._key = "image"
        own = {self._key: inner} if self._key else dict(inner.spaces)  # type: ignore[attr-defined]
        if ACTION_MASK in own:
            raise SpaceError(f"The observations hold {ACTION_MASK!r} already: leave info_mask out.")
        self.observation_space = spaces.Dict(
            {**own, ACTION_MASK: spaces.MultiBinary(self._choices)}
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info, last=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        last = bool(terminated or truncated)
        result = self._with_mask(observation, info, last=last)
        return result, reward, terminated, truncated, info

    def _with_mask(
        self, observation: Any, info: Mapping[str, Any], *, last: bool
    ) -> dict[str, Any]:
        own = {self._key: observation} if self._key else dict(observation)
        return {**own, ACTION_MASK: self._mask(info, last)}

    def _mask(self, info: Mapping[str, Any], last: bool) -> NDArray[np.int8]:
        given = info.get(ACTION_MASK)
        if given is None and last:
            return np.zeros(self._choices, np.int8)
        if given is None:
            raise SpaceError(
                f"info holds no {ACTION_MASK!r}: return one with each step, or leave info_mask out."
            )
        parts = given if isinstance(given, tuple) else (given,)
        return np.concatenate([np.ravel(part) for part in parts]).astype(bool).astype(np.int8)
