"""Gymnasium: `gym:ID` for any registered id, and the adapter for any Gymnasium environment.

Single observations are named `image` (uint8 with three dimensions) or `vector`; the keys of Dict
spaces are joined with a slash. Single actions are named `action`. Discrete values start at 0
whatever the space's own start is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EpisodicEnv, Outcome
from dreamfleet.envs.errors import SpaceError
from dreamfleet.envs.extras import need
from dreamfleet.spaces import Space

Observe = Literal["state", "pixels", "both"]

# An integer vector is given to the agent as one-hot codes; with more choices than this it is
# given as numbers instead.
_MOST_CLASSES = 256


class GymEnv(EpisodicEnv):
    """Any Gymnasium environment.

    `obs="pixels"` replaces the observations by rendered frames under the key `image`, "both"
    adds them; the environment has to have been made with `render_mode="rgb_array"` for that.
    """

    def __init__(self, env: Any, *, seed: int = 0, obs: Observe = "state") -> None:
        self._env = env
        self._seed: int | None = seed
        self._state = obs != "pixels"
        self._pixels = obs != "state"
        obs_leaves = _leaves(env.observation_space, "observation")
        act_leaves = _leaves(env.action_space, "action")
        self._single_obs = None in obs_leaves
        self._single_act = None in act_leaves
        self._readers: dict[str, Callable[[Any], NDArray[Any]]] = {}
        self._writers: dict[str, Callable[[Any], Any]] = {}
        obs_space: dict[str, Space] = {}
        act_space: dict[str, Space] = {}
        if self._state:
            for path, space in obs_leaves.items():
                key = path or ("image" if len(space.shape or ()) == 3 else "vector")
                obs_space[key], self._readers[key] = _observation(space, key)
        for path, space in act_leaves.items():
            key = path or "action"
            act_space[key], self._writers[key] = _action(space, key)
        if self._pixels:
            if "image" in obs_space:
                raise SpaceError(
                    "The environment has an observation 'image' already: use obs='state'."
                )
            obs_space["image"] = Space(np.uint8, self._first_frame().shape)
        super().__init__(obs_space, act_space)

    def _begin(self) -> Arrays:
        # Seeded once: seeding every reset would play the same episode for ever.
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return self._observe(observation)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        if self._single_act:
            native: Any = self._writers["action"](action["action"])
        else:
            native = _nested({key: write(action[key]) for key, write in self._writers.items()})
        observation, reward, terminated, truncated, _ = self._env.step(native)
        last = bool(terminated or truncated)
        return Outcome(self._observe(observation), float(reward), last, bool(terminated))

    def _observe(self, observation: Any) -> Arrays:
        result: Arrays = {}
        if self._state and self._single_obs:
            for key, read in self._readers.items():
                result[key] = read(observation)
        elif self._state:
            for key, read in self._readers.items():
                value = observation
                for part in key.split("/"):
                    value = value[part]
                result[key] = read(value)
        if self._pixels:
            result["image"] = self._frame()
        return result

    def _first_frame(self) -> NDArray[np.uint8]:
        self._env.reset(seed=self._seed)
        return self._frame()

    def _frame(self) -> NDArray[np.uint8]:
        frame = self.render()
        if frame is None:
            raise SpaceError(
                "The environment renders no frames: make it with render_mode='rgb_array', or use "
                "obs='state'."
            )
        return frame

    def render(self) -> NDArray[np.uint8] | None:
        if getattr(self._env, "render_mode", None) != "rgb_array":
            return None
        return np.asarray(self._env.render(), np.uint8)

    def close(self) -> None:
        self._env.close()


def tasks() -> list[str]:
    return sorted(need("gymnasium", "gym", extra=None).registry)


def constructor(name: str) -> Callable[..., Env] | None:
    gymnasium = need("gymnasium", "gym", extra=None)
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error:
        return None
    return functools.partial(_make, name)


def _make(
    name: str, *, seed: int = 0, obs: Observe = "state", render: bool = False, **options: Any
) -> Env:
    gymnasium = need("gymnasium", "gym", extra=None)
    if render or obs != "state":
        options["render_mode"] = "rgb_array"
        _hush_pygame()
    # Its own checker costs more than the step of a small environment, and ours runs anyway.
    env = gymnasium.make(name, disable_env_checker=True, **options)
    return GymEnv(env, seed=seed, obs=obs)


def _hush_pygame() -> None:
    """Many environments draw with pygame, which looks for a screen and speakers and complains
    where there are none. Frames need neither."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _leaves(space: Any, role: str, path: str | None = None) -> dict[str | None, Any]:
    """The spaces inside Dict spaces by their path; a space that is no Dict has no path."""
    if hasattr(space, "spaces") and isinstance(space.spaces, Mapping):
        result: dict[str | None, Any] = {}
        for name, inner in space.spaces.items():
            result |= _leaves(inner, role, f"{path}/{name}" if path else str(name))
        if not result:
            raise SpaceError(f"The {role} space is an empty Dict: there is nothing in it.")
        return result
    return {path: space}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return result


def _observation(space: Any, key: str) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    kind = type(space).__name__
    if kind == "Box":
        return _box(space)
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
        return target, lambda value: np.asarray(value - start, np.int32)
    if kind == "MultiBinary":
        return Space(bool, space.shape), lambda value: np.asarray(value, bool)
    raise _unsupported(kind, f"Observation {key!r}", "FilterObservation or TransformObservation")


def _action(space: Any, key: str) -> tuple[Space, Callable[[Any], Any]]:
    kind = type(space).__name__
    dtype = space.dtype
    if kind == "Box" and np.dtype(dtype).kind == "f":
        return (
            Space(np.float32, space.shape, space.low, space.high),
            lambda value: np.asarray(value, dtype),
        )
    if kind == "Discrete":
        target, start = _discrete(space)
        # Environments use a discrete action as an index or a dictionary key: a plain integer.
        return target, lambda value: int(value) + start
    if kind == "MultiDiscrete":
        target, start = _discrete(space)
        return target, lambda value: np.asarray(value + start, dtype)
    if kind == "MultiBinary":
        return Space(np.int32, space.shape, 0, 2), lambda value: np.asarray(value, dtype)
    if kind == "Box" and np.all(space.high.astype(np.int64) - space.low < _MOST_CLASSES):
        start = space.low.astype(np.int64)
        target = Space(np.int32, space.shape, 0, space.high.astype(np.int64) - start + 1)
        return target, lambda value: np.asarray(value + start, dtype)
    raise _unsupported(kind, f"Action {key!r}", "TransformAction")


def _box(space: Any) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    dtype, shape = np.dtype(space.dtype), space.shape
    if dtype == np.uint8 and len(shape) == 3:
        return Space(np.uint8, shape), lambda value: np.asarray(value, np.uint8)
    if dtype.kind in "iub":
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        if np.all(high - low < _MOST_CLASSES) and np.all(low >= 0):
            target = Space(np.int32, shape, 0, high + 1)
            return target, lambda value: np.asarray(value, np.int32)
        return Space(np.float32, shape, low, high), lambda value: np.asarray(value, np.float32)
    with np.errstate(over="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return Space(np.float32, shape, low, high), lambda value: np.asarray(value, np.float32)


def _discrete(space: Any) -> tuple[Space, Any]:
    if type(space).__name__ == "Discrete":
        return Space(np.int32, (), 0, int(space.n)), int(space.start)
    start = np.asarray(getattr(space, "start", 0), np.int64)
    return Space(np.int32, space.nvec.shape, 0, space.nvec), start


def _unsupported(kind: str, what: str, wrapper: str) -> SpaceError:
    return SpaceError(
        f"{what} is a {kind} space, which no agent here can take: use Box, Discrete, "
        f"MultiDiscrete, MultiBinary or a Dict of these, for example with gymnasium.wrappers."
        f"{wrapper}."
    )
