"""Gymnasium: `gym:ID` for any registered id, and the adapter for any Gymnasium environment.

Single observations are named `image` (uint8 with three dimensions) or `vector`; the keys of Dict
spaces are joined with a slash. Single actions are named `action`. Discrete values start at 0
whatever the space's own start is.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EpisodicEnv, Outcome, Spaces
from dreamfleet.envs.images import resize
from dreamfleet.envs.registry import check_name
from dreamfleet.envs.wrappers import Bounds, affine_actions, as_integers
from dreamfleet.errors import MissingExtraError
from dreamfleet.spaces import Space, SpaceError, is_image

Observe = Literal["state", "pixels", "both"]
# Names of Dict spaces from the outermost on. They may hold slashes themselves, so the joined key
# does not tell them.
_Path = tuple[Any, ...]

# An integer vector is given to the agent as one-hot codes; with more choices than this it is
# given as numbers instead.
_MOST_CLASSES = 256


class GymTranslation:
    """Between the spaces of Gymnasium and ours.

    Raises:
        SpaceError: A space that no agent here can take.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        obs_leaves = _leaves(observation_space, "observation")
        act_leaves = _leaves(action_space, "action")
        self._readers: dict[str, tuple[_Path, Callable[[Any], NDArray[Any]]]] = {}
        self._writers: dict[str, tuple[_Path, Callable[[Any], Any]]] = {}
        self.obs_space: Spaces = {}
        self.act_space: Spaces = {}
        for path, space in obs_leaves.items():
            key = _joined(path) or ("image" if len(space.shape or ()) == 3 else "vector")
            self.obs_space[key], read = _observation(space, key)
            self._readers[key] = path, read
        for path, space in act_leaves.items():
            key = _joined(path) or "action"
            self.act_space[key], write = _action(space, key)
            self._writers[key] = path, write

    def observe(self, observation: Any) -> Arrays:
        """An observation of Gymnasium's, by key."""
        result: Arrays = {}
        for key, (path, read) in self._readers.items():
            value = observation
            for name in path:
                value = value[name]
            result[key] = read(value)
        return result

    def act(self, action: Mapping[str, Any]) -> Any:
        """An action as the Gymnasium environment takes it."""
        result: dict[Any, Any] = {}
        for key, (path, write) in self._writers.items():
            value = write(action[key])
            if not path:
                return value
            inner = result
            for parent in path[:-1]:
                inner = inner.setdefault(parent, {})
            inner[path[-1]] = value
        return result


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
        self._translation = translation = GymTranslation(env.observation_space, env.action_space)
        obs_space = dict(translation.obs_space) if self._state else {}
        if self._pixels:
            if "image" in obs_space:
                raise SpaceError(
                    "The environment has an observation 'image' already: use obs='state'."
                )
            obs_space["image"] = Space(np.uint8, self._first_frame().shape)
        super().__init__(obs_space, translation.act_space)

    def _begin(self) -> Arrays:
        # Seeded once: seeding every reset would repeat the same episode.
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return self._observe(observation)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        native = self._translation.act(action)
        observation, reward, terminated, truncated, _ = self._env.step(native)
        last = bool(terminated or truncated)
        return Outcome(self._observe(observation), float(reward), last, bool(terminated))

    def _observe(self, observation: Any) -> Arrays:
        result = self._translation.observe(observation) if self._state else {}
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
        try:
            return np.asarray(self._env.render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtraError(f"The environment cannot render: {error}") from error

    def close(self) -> None:
        self._env.close()


class GymPlayer:
    """A policy for one Gymnasium environment: called with an observation of that environment, it
    returns an action. It keeps the carry of the episode itself.

    Args:
        policy: Called with an observation and a state, returns an action and the next state.
        obs_space: The observations that the policy was trained on.
        env: Its spaces are used; it is not stepped.
        action_bounds: The option of that name that the policy was trained with.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        obs_space: Spaces,
        env: Any,
        *,
        action_bounds: Bounds | Mapping[str, Bounds] | None = None,
    ) -> None:
        self._policy = policy
        self._translation = translation = GymTranslation(env.observation_space, env.action_space)
        self._scale, _ = affine_actions(translation.act_space, action_bounds)
        self._resize: dict[str, tuple[int, int]] = {}
        self._state: Any = None
        for key, trained in obs_space.items():
            here = translation.obs_space.get(key)
            if here is None:
                raise SpaceError(
                    f"The policy was trained on {', '.join(obs_space)}, and this environment gives "
                    f"{', '.join(translation.obs_space)}: wrap it so that it gives {key!r} too."
                )
            images = all(is_image(space.dtype, space.shape) for space in (here, trained))
            if images and here.shape[2] == trained.shape[2]:
                self._resize[key] = trained.shape[:2]  # type: ignore[assignment]
            elif here.shape != trained.shape:
                raise SpaceError(
                    f"{key!r} has shape {here.shape} here, and the policy was trained with "
                    f"{trained.shape}."
                )

    def reset(self) -> None:
        """Forget the episode; the next observation is the first of a new one."""
        self._state = None

    def __call__(self, observation: Any) -> Any:
        obs = self._translation.observe(observation)
        obs |= {key: resize(obs[key], size) for key, size in self._resize.items()}
        action, self._state = self._policy(obs, self._state)
        scaled = {key: scale(action[key]) for key, scale in self._scale.items()}
        return self._translation.act({**action, **scaled})


def tasks() -> list[str]:
    """The names of the tasks of this suite."""
    return sorted(gymnasium.registry)


def constructor(name: str) -> Callable[..., Env] | None:
    """What makes a task of this suite."""
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error:
        return None
    return functools.partial(_make, name)


def _make(
    name: str, *, seed: int = 0, obs: Observe = "state", render: bool = False, **options: Any
) -> Env:
    known = _creator_options(gymnasium.spec(name).entry_point)
    for option in options if known else ():
        check_name(f"gym:{name}", option, {*known, "max_episode_steps", "obs", "render"})
    if render or obs != "state":
        options["render_mode"] = "rgb_array"
        _quiet_pygame()
    # Gymnasium's checker costs more than a step of a small environment, and ours runs anyway.
    env = gymnasium.make(name, disable_env_checker=True, **options)
    return GymEnv(env, seed=seed, obs=obs)


def _creator_options(entry_point: Any) -> set[str]:
    """The options of an environment's constructor; empty if it accepts any."""
    creator = entry_point if callable(entry_point) else load_env_creator(entry_point)
    parameters = inspect.signature(creator).parameters.values()
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return set() if anything else {p.name for p in parameters} - {"render_mode"}


def _quiet_pygame() -> None:
    """Many environments render with pygame, which looks for a screen and speakers and warns
    where there are none. Frames need neither."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _leaves(space: Any, role: str, path: _Path = ()) -> dict[_Path, Any]:
    """The spaces inside Dict spaces by their path, which is empty for any other space."""
    if hasattr(space, "spaces") and isinstance(space.spaces, Mapping):
        result: dict[_Path, Any] = {}
        for name, inner in space.spaces.items():
            result |= _leaves(inner, role, (*path, name))
        if not result:
            raise SpaceError(f"The {role} space is an empty Dict: there is nothing in it.")
        return result
    return {path: space}


def _joined(path: _Path) -> str:
    return "/".join(map(str, path))


def _observation(space: Any, key: str) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    kind = type(space).__name__
    if kind == "Box":
        return _box(space, key)
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
        return target, lambda value: as_integers(key, value - start, np.int32)
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


def _box(space: Any, key: str) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    dtype, shape = np.dtype(space.dtype), space.shape
    if is_image(dtype, shape):
        return Space(np.uint8, shape), lambda value: as_integers(key, value, np.uint8)
    if dtype.kind in "iub":
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        if np.all(high - low < _MOST_CLASSES) and np.all(low >= 0):
            target = Space(np.int32, shape, 0, high + 1)
            return target, lambda value: as_integers(key, value, np.int32)
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
