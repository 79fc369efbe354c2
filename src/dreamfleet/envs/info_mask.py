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
        self._key = "image" if len(inner.shape or ()) == 3 else "vector"
        self._named = isinstance(inner, spaces.Dict)
        own = self._by_key(inner.spaces if isinstance(inner, spaces.Dict) else inner)
        if ACTION_MASK in own:
            raise SpaceError(f"The observations hold {ACTION_MASK!r} already: leave info_mask out.")
        self.observation_space = spaces.Dict(
            {**own, ACTION_MASK: spaces.MultiBinary(self._choices)}
        )

    def _by_key(self, whole: Any) -> dict[str, Any]:
        return dict(whole) if self._named else {self._key: whole}

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return {**self._by_key(observation), ACTION_MASK: self._mask(info, last=False)}, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        mask = self._mask(info, last=bool(terminated or truncated))
        result = {**self._by_key(observation), ACTION_MASK: mask}
        return result, reward, terminated, truncated, info

    def _mask(self, info: Mapping[str, Any], *, last: bool) -> NDArray[np.int8]:
        given = info.get(ACTION_MASK)
        if given is None and last:
            return np.zeros(self._choices, np.int8)
        if given is None:
            raise SpaceError(
                f"info holds no {ACTION_MASK!r}: return one with each step, or leave info_mask out."
            )
        parts = given if isinstance(given, tuple) else (given,)
        return np.concatenate([np.ravel(part) for part in parts]).astype(bool).astype(np.int8)
