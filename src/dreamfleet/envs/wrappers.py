"""Environments around environments: each wrapper takes any `Env` and is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, Spaces, is_image
from dreamfleet.envs.errors import EnvCrashedError, SpaceError
from dreamfleet.envs.images import resize
from dreamfleet.spaces import Space

log = logging.getLogger(__name__)


class Wrapper:
    """Passes everything on."""

    def __init__(self, env: Env) -> None:
        self.env = env

    @property
    def obs_space(self) -> Spaces:
        return self.env.obs_space

    @property
    def act_space(self) -> Spaces:
        return self.env.act_space

    def step(self, action: Mapping[str, Any]) -> Arrays:
        return self.env.step(action)

    def render(self) -> NDArray[np.uint8] | None:
        render = getattr(self.env, "render", None)
        return render() if render else None

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close:
            close()


class NormalizeActions(Wrapper):
    """Continuous actions run from -1 to 1, and what lies outside is clipped.

    Finite bounds are mapped affinely. A dimension without two finite bounds is passed on as it
    is, clipped to -1..1 and to the one bound it may have.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._native = affine_actions(env.act_space)
        self._act_space = {
            key: Space(space.dtype, space.shape, -1, 1) if key in self._native else space
            for key, space in env.act_space.items()
        }

    @property
    def act_space(self) -> Spaces:
        return self._act_space

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if not self._native:
            return self.env.step(action)
        native = {key: convert(action[key]) for key, convert in self._native.items()}
        return self.env.step({**action, **native})


def affine_actions(act_space: Spaces) -> dict[str, Callable[[Any], NDArray[Any]]]:
    """What maps each continuous action from -1..1 to its own bounds."""
    return {key: _AffineAction(space) for key, space in act_space.items() if not space.discrete}


class _AffineAction:
    """From -1..1 to the bounds of a space."""

    def __init__(self, space: Space) -> None:
        finite = np.isfinite(space.low) & np.isfinite(space.high)
        # Zeros stand in for infinite bounds: numpy would warn about values that are thrown away.
        low, high = np.where(finite, space.low, 0), np.where(finite, space.high, 0)
        self._center = (low + high) / 2
        self._half = np.where(finite, (high - low) / 2, 1.0)
        self._low, self._high = space.low, space.high
        self._dtype = space.dtype

    def __call__(self, value: Any) -> NDArray[Any]:
        # Clipped before, because the agent's sample may lie outside, and after, because of the
        # last bit and of bounds on one side. Twice two ufuncs are quicker than `np.clip`.
        unit = np.minimum(np.maximum(value, -1.0), 1.0)
        mapped = self._center + unit * self._half
        bounded: NDArray[Any] = np.minimum(np.maximum(mapped, self._low), self._high)
        return bounded.astype(self._dtype)


class UnifyDtypes(Wrapper):
    """Floats become float32, integers int32; uint8 and bool stay. Actions are cast back.

    Floats where the space says integers are refused: casting would hide them from the check.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._obs_space = {key: _unified(space) for key, space in env.obs_space.items()}
        self._act_space = {key: _unified(space) for key, space in env.act_space.items()}
        self._obs_dtypes = {key: space.dtype for key, space in self._obs_space.items()}
        self._act_dtypes = {
            key: space.dtype
            for key, space in env.act_space.items()
            if space.dtype != self._act_space[key].dtype
        }

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        return self._act_space

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if self._act_dtypes:
            cast = {key: np.asarray(action[key], kind) for key, kind in self._act_dtypes.items()}
            action = {**action, **cast}
        obs = self.env.step(action)
        dtypes = self._obs_dtypes
        result: Arrays = {}
        for key, value in obs.items():
            # A key that no space declares is left to the check that names it.
            kind = dtypes.get(key)
            integer = kind is not None and kind.kind in "iu"
            result[key] = whole(key, value, kind) if integer else np.asarray(value, kind)
        return result


def whole(key: str, value: Any, dtype: Any) -> NDArray[Any]:
    """An observation as integers. Of floats the fractions would be lost in silence: an image from
    0 to 1 would be black."""
    array = np.asarray(value)
    if array.dtype.kind == "f":
        raise SpaceError(
            f"Observation {key!r} has dtype {array.dtype}, but its space says {np.dtype(dtype)}: "
            "return integers, or declare a float space."
        )
    return array if array.dtype == dtype else array.astype(dtype)


class TimeLimit(Wrapper):
    """Ends an episode after `limit` actions, as last but not terminal."""

    def __init__(self, env: Env, limit: int) -> None:
        super().__init__(env)
        self._limit = limit
        self._taken = 0
        self._over = True

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if self._over and not action["reset"]:
            action = {**action, "reset": np.array(True)}
        obs = self.env.step(action)
        self._taken = 0 if obs["is_first"] else self._taken + 1
        if self._taken >= self._limit:
            obs = {**obs, "is_last": np.array(True)}
        self._over = bool(obs["is_last"])
        return obs


class ActionRepeat(Wrapper):
    """Takes every action `repeat` times and sums the rewards; other keys are of the last step."""

    def __init__(self, env: Env, repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Mapping[str, Any]) -> Arrays:
        reward = 0.0
        for _ in range(self._repeat):
            obs = self.env.step(action)
            # First comes with a reset, and also when the environment was restarted on the way.
            if obs["is_first"]:
                return obs
            reward += float(obs["reward"])
            if obs["is_last"]:
                break
        return {**obs, "reward": np.array(reward, np.float32)}


class ResizeImages(Wrapper):
    """Brings every uint8 image (height, width, channels) to one size."""

    def __init__(self, env: Env, size: tuple[int, int]) -> None:
        super().__init__(env)
        self._size = size
        self._keys = [key for key, space in env.obs_space.items() if is_image(space)]
        self._obs_space = {
            key: Space(np.uint8, (*size, space.shape[2])) if key in self._keys else space
            for key, space in env.obs_space.items()
        }

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    def step(self, action: Mapping[str, Any]) -> Arrays:
        obs = self.env.step(action)
        return {**obs, **{key: resize(obs[key], self._size) for key in self._keys}}


class RestartOnException(Wrapper):
    """Builds the environment anew when it raises, and begins an episode there.

    The broken episode gets no last step; `is_first` where none was asked for tells whoever
    listens that it was abandoned. `make` is given the number of restarts so far, so that a
    restarted environment need not play the same episodes again. After `restarts` in a row without
    one finished episode the failure is passed on.
    """

    def __init__(self, make: Callable[[int], Env], *, restarts: int) -> None:
        super().__init__(make(0))
        self._make = make
        self._allowed = restarts
        self._total = 0
        self._in_a_row = 0

    def step(self, action: Mapping[str, Any]) -> Arrays:
        while True:
            try:
                obs = self.env.step(action)
            except Exception as error:
                self._restart(error)
                action = {**action, "reset": np.array(True)}
                continue
            if obs["is_last"]:
                self._in_a_row = 0
            return obs

    def _restart(self, error: Exception) -> None:
        if self._in_a_row >= self._allowed:
            raise EnvCrashedError(
                f"The environment raised {type(error).__name__}: {error}. It was restarted "
                f"{self._in_a_row} times without finishing an episode: fix it, or raise restarts."
            ) from error
        self._in_a_row += 1
        self._total += 1
        log.warning(
            "the environment raised %s: %s; restart %d", type(error).__name__, error, self._total
        )
        try:
            self.close()
        except Exception as closing:
            log.warning("closing the broken environment failed too: %s", closing)
        try:
            self.env = self._make(self._total)
        except Exception as making:
            self._restart(making)


def _unified(space: Space) -> Space:
    if space.dtype.kind == "f":
        # Bounds are rounded as the values will be, so that a value on its bound stays inside.
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return Space(np.float32, space.shape, low, high)
    if space.dtype == np.uint8 or space.dtype.kind == "b":
        return space
    info = np.iinfo(np.int32)
    low, high = np.maximum(space.low, info.min), np.minimum(space.high, info.max)
    return Space(np.int32, space.shape, low, high)
