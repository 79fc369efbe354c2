"""Does an environment do what its spaces say?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import RESERVED, Arrays, Env, is_image
from dreamfleet.envs.errors import SpaceError
from dreamfleet.envs.wrappers import Wrapper
from dreamfleet.spaces import Space


class CheckSpaces(Wrapper):
    """Names the key, and the fix, when an environment and its spaces disagree.

    Keys, shapes, dtypes and non-numbers are checked on every step. Bounds are checked on the
    first `bounds_for` steps: that finds a wrong declaration without paying for it forever.
    """

    def __init__(self, env: Env, *, bounds_for: int = 200) -> None:
        super().__init__(env)
        check_declaration(env.obs_space, env.act_space)
        self._remaining = bounds_for
        self._expected = {
            key: (space.dtype, space.shape, not space.discrete)
            for key, space in env.obs_space.items()
        }

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if self._remaining > 0:
            self._check_action(action)
        obs = self.env.step(action)
        if obs.keys() != self._expected.keys():
            self._complain_about_keys(obs)
        for key, (dtype, shape, continuous) in self._expected.items():
            value = obs[key]
            if value.dtype != dtype or value.shape != shape:
                raise SpaceError(
                    f"Observation {key!r} has dtype {value.dtype} and shape {value.shape}, but the "
                    f"space says {dtype} and {shape}: make obs_space[{key!r}] or the value right."
                )
            if continuous and not _numbers(value):
                raise SpaceError(
                    f"Observation {key!r} holds NaN or infinity: the environment has to return "
                    "finite numbers (-inf alone may mark a missing value)."
                )
        if self._remaining > 0:
            self._remaining -= 1
            self._check_bounds(obs)
        return obs

    def _check_action(self, action: Mapping[str, Any]) -> None:
        for key, space in self.env.act_space.items():
            if key not in action:
                raise SpaceError(
                    f"The action lacks {key!r}: it needs the keys {sorted(self.env.act_space)}."
                )
            shape = np.shape(action[key])
            if shape != space.shape:
                raise SpaceError(
                    f"Action {key!r} has shape {shape}, but its space is {space}: pass one action "
                    "for one environment, without a batch axis."
                )
            if space.discrete and not space.contains(np.asarray(action[key], space.dtype)):
                raise SpaceError(
                    f"Action {key!r} is {action[key]}, outside its space {space}: choose from "
                    f"{space.low.min()} to {space.high.max() - 1}."
                )

    def _check_bounds(self, obs: Arrays) -> None:
        for key, space in self.env.obs_space.items():
            value = obs[key]
            if space.contains(value) or np.any(np.isneginf(value)):
                continue
            raise SpaceError(
                f"Observation {key!r} runs from {value.min()} to {value.max()}, outside its space "
                f"{space}: widen obs_space[{key!r}] or clip the value."
            )

    def _complain_about_keys(self, obs: Arrays) -> None:
        missing = sorted(self._expected.keys() - obs.keys())
        if missing:
            raise SpaceError(
                f"The observation lacks {missing[0]!r}, which obs_space declares: return it on "
                "every step or take it out of obs_space."
            )
        extra = sorted(obs.keys() - self._expected.keys())
        raise SpaceError(
            f"The observation holds {extra[0]!r}, which obs_space does not declare: add it to "
            "obs_space or do not return it."
        )


def check_declaration(obs_space: Mapping[str, Space], act_space: Mapping[str, Space]) -> None:
    """Refuse spaces that an agent cannot work with."""
    for key, expected in RESERVED.items():
        if key not in obs_space:
            raise SpaceError(
                f"obs_space lacks {key!r}: add Space({expected.dtype}) and return it on each step."
            )
        given = obs_space[key]
        if given.shape != () or given.dtype != expected.dtype:
            raise SpaceError(
                f"obs_space[{key!r}] is {given}, but has to be a scalar of dtype {expected.dtype}."
            )
    if "reset" not in act_space or act_space["reset"] != Space(bool):
        raise SpaceError("act_space needs the key 'reset' with Space(bool).")
    if len(act_space) == 1:
        raise SpaceError("act_space holds 'reset' only: add at least one action.")
    for key, space in obs_space.items():
        if len(space.shape) > 2 and not is_image(space) and not key.startswith("log/"):
            raise SpaceError(
                f"Observation {key!r} has dtype {space.dtype} and shape {space.shape}: an image "
                "is uint8 with (height, width, channels), anything else has at most two "
                "dimensions. Convert or flatten it."
            )


def _numbers(value: NDArray[Any]) -> bool:
    """Whether there is neither NaN nor infinity. Minus infinity may mark a missing value."""
    # NaN spreads through the maximum and compares false. Scalars and the ufunc itself are several
    # times quicker than the method `max`, and this runs on every step.
    largest = value if value.ndim == 0 else np.maximum.reduce(value, None)
    return float(largest) < math.inf
