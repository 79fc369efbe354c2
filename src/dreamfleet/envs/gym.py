"""Gymnasium: `gym:ID` for any registered id, and the adapter for any Gymnasium environment.

A single observation is named `image` (see `layouts`) or `vector`, a single action `action`. The
keys of Dict and the numbers of Tuple spaces are joined with a slash. Discrete values start at 0,
whatever the start of the space is.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray

from dreamfleet.envs.base import (
    Arrays,
    Env,
    EnvError,
    EpisodicEnv,
    Outcome,
    Spaces,
)
from dreamfleet.envs.images import resize
from dreamfleet.envs.info_mask import MaskFromInfo
from dreamfleet.envs.layouts import (
    MOST_CLASSES,
    Asked,
    Box,
    Read,
    as_dtype,
    layouts_asked,
    read_box,
)
from dreamfleet.envs.registry import check_options, takes_anything
from dreamfleet.envs.wrappers import Bounds, affine_actions
from dreamfleet.errors import ConfigError, MissingExtraError
from dreamfleet.masks import ACTION_MASK
from dreamfleet.spaces import LOG_PREFIX, Space, SpaceError, is_image

Observe = Literal["state", "pixels", "both"]
Vectorization = Literal["sync", "async", "vector_entry_point"]
# Names of nested Dict spaces, the outermost first. A name may hold slashes itself.
_Path = tuple[Any, ...]

# Names in `info` that most libraries use, often at the end of an episode only.
_LOGGED = ("success", "is_success")
_MISSING = np.array(-np.inf, np.float32)
_MISSING.setflags(write=False)
_LARGEST_LOGGED = 1e18
_MOST_UNLOGGED = 100


class GymTranslation:
    """Translates between the spaces of Gymnasium and ours; `batched` observations and actions have
    a leading axis.

    Raises:
        SpaceError: A space that no agent supports.
        ConfigError: The option does not fit.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        image_layout: Asked = None,
        *,
        batched: bool = False,
    ) -> None:
        self._readers: dict[str, tuple[_Path, Read]] = {}
        self._writers: dict[_Path, tuple[str, Callable[[Any], Any]]] = {}
        self._action_space = action_space
        self.obs_space: Spaces = {}
        self.act_space: Spaces = {}
        self.notes: list[str] = []
        leaves = _leaves(observation_space, "observation")
        shapes = {_joined(path) or "vector": space.shape or () for path, space in leaves.items()}
        asked = layouts_asked(image_layout, shapes)
        for path, space in leaves.items():
            key = _joined(path) or "vector"
            if 0 in (space.shape or ()):
                self.notes.append(f"Observation {key!r} has shape {space.shape}: it is left out.")
                continue
            if type(space).__name__ == "Box":
                box = Box(key, np.dtype(space.dtype), space.shape, space.low, space.high)
                target, read, note = read_box(
                    box, asked.get(key, ""), image="" if path else "image"
                )
                key = "image" if target.image and not path else key
                self.notes += [note] if note else []
            else:
                target, read = _observation(space, key, inside=bool(path))
            if key in self._readers:
                raise SpaceError(f"Two observations are named {key!r}: rename one of them.")
            self.obs_space[key], self._readers[key] = target, (path, read)
        if not self._readers:
            raise SpaceError("The observation holds no number: there is nothing to learn from.")
        for path, space in _leaves(action_space, "action").items():
            key = _joined(path) or "action"
            self.act_space[key], write = _action(space, key, batched=batched)
            self._writers[path] = key, write

    def keep(self, *keys: str) -> None:
        """Leave out all observations but these."""
        self._readers = {key: self._readers[key] for key in keys if key in self._readers}
        self.obs_space, self.notes = {key: self.obs_space[key] for key in self._readers}, []

    def observe(self, observation: Any) -> Arrays:
        """A Gymnasium observation by key."""
        result: Arrays = {}
        for key, (path, read) in self._readers.items():
            value = observation
            for name in path:
                value = value[name]
            result[key] = read(value)
        return result

    def act(self, action: Mapping[str, Any]) -> Any:
        """The action for the Gymnasium environment."""
        return self._native(action, self._action_space, ())

    def _native(self, action: Mapping[str, Any], space: Any, path: _Path) -> Any:
        if path in self._writers:
            key, write = self._writers[path]
            return write(action[key])
        inner = (_inner(space) or {}).items()
        parts = {name: self._native(action, part, (*path, name)) for name, part in inner}
        return parts if isinstance(space.spaces, Mapping) else tuple(parts.values())


class InfoLog:
    """Numbers of `info` that are logged, as `log/NAME`: those named `success`, `is_success` or in
    `log_info`; -inf where they are missing.

    `unlogged` collects other names that start with `log/`: keys that were not known when the
    environment was made.
    """

    def __init__(self, env: Any, log_info: str | Sequence[str] | None, obs_space: Spaces) -> None:
        asked = (log_info,) if isinstance(log_info, str) else log_info or ()
        # Gymnasium's own environments report no success, and each key makes a step slower.
        spec, inner = getattr(env, "spec", None), getattr(env, "unwrapped", env)
        modules = {type(inner).__module__, str(getattr(spec, "entry_point", ""))}
        own = any(module.startswith("gymnasium.envs.") for module in modules)
        self._names = {
            key: name
            for name in (*(() if own else _LOGGED), *asked)
            if (key := name if name.startswith(LOG_PREFIX) else LOG_PREFIX + name) not in obs_space
        }
        self._known = {*obs_space, *self._names}
        self.spaces: Spaces = dict.fromkeys(self._names, Space(np.float32))
        self.missing: Arrays = dict.fromkeys(self._names, _MISSING)
        self.unlogged: list[str] = []

    def read(self, info: Any, number: Callable[[Any, str], NDArray[Any]]) -> Arrays:
        """What is logged of a step; `number` finds a number, or one of each lane."""
        for name in info:
            if isinstance(name, str) and name.startswith(LOG_PREFIX) and name not in self._known:
                room = len(self.unlogged) < _MOST_UNLOGGED
                if room and not np.all(number(info, name) == _MISSING):
                    self._known.add(name)
                    self.unlogged.append(name)
        return {key: number(info, name) for key, name in self._names.items()}


def _number(info: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    return loggable_number(info.get(name))


def loggable_number(value: Any) -> NDArray[np.float32]:
    """A number to log; -inf for anything else."""
    if value is None or isinstance(value, (str, Mapping)) or np.size(value) != 1:
        return _MISSING
    array = np.asarray(value).reshape(())
    fits = array.dtype.kind in "biuf" and -_LARGEST_LOGGED < array < _LARGEST_LOGGED
    return array.astype(np.float32) if fits else _MISSING


class GymEnv(EpisodicEnv):
    """Any Gymnasium environment.

    `obs="pixels"` replaces the observations by rendered frames under the key `image`, "both"
    adds them; both need an environment with `render_mode="rgb_array"`. `image_layout` names the
    axes of images that are not recognised. `notes` say what was recognised. For `log_info` and
    `unlogged`, see `InfoLog`.
    """

    def __init__(
        self,
        env: Any,
        *,
        seed: int = 0,
        obs: Observe = "state",
        image_layout: Asked = None,
        log_info: str | Sequence[str] | None = None,
    ) -> None:
        _check_reset(env)
        self.env = env
        self._seed: int | None = seed
        self._pixels = obs != "state"
        layout = None if obs == "pixels" else image_layout
        translation = GymTranslation(env.observation_space, env.action_space, layout)
        if obs == "pixels":  # frames do not say which actions are allowed
            translation.keep(ACTION_MASK)
        obs_space = dict(translation.obs_space)
        if self._pixels:
            if "image" in obs_space:
                raise SpaceError(
                    "The environment has an observation 'image' already: use obs='state'."
                )
            env.reset(seed=seed)
            obs_space["image"] = Space(np.uint8, self._frame().shape)
        self._translation, self.notes = translation, translation.notes
        self._info = InfoLog(env, log_info, obs_space)
        self.unlogged = self._info.unlogged
        super().__init__({**obs_space, **self._info.spaces}, translation.act_space)

    def _begin(self) -> Arrays:
        # Seeded once: seeding every reset would repeat the same episode.
        obs, info = reset_result(self.env, self.env.reset(seed=self._seed))
        self._seed = None
        return self._observe(obs, info)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        native = self._translation.act(action)
        result = self.env.step(native)
        if len(result) != 5:
            raise _old_interface(self.env, f"its step returns {len(result)} values")
        observation, reward, terminated, truncated, info = result
        last = bool(terminated or truncated)
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            reward = _only_number(reward)
        return Outcome(self._observe(observation, info), reward, last, bool(terminated))

    def _observe(self, observation: Any, info: Any) -> Arrays:
        result = self._translation.observe(observation)
        if self._pixels:
            result["image"] = self._frame()
        result |= self._info.read(info, _number) if info else self._info.missing
        return result

    def _frame(self) -> NDArray[np.uint8]:
        frame = self.render()
        if frame is None:
            raise SpaceError(
                "The environment renders no frames: make it with render_mode='rgb_array', or use "
                "obs='state'."
            )
        return frame

    def render(self) -> NDArray[np.uint8] | None:
        if getattr(self.env, "render_mode", None) != "rgb_array":
            return None
        try:
            return np.asarray(self.env.render(), np.uint8)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtraError(f"The environment cannot render: {error}") from error

    def close(self) -> None:
        self.env.close()


class GymPlayer:
    """A policy for one Gymnasium environment: maps its observations to its actions, and keeps the
    carry of the episode."""

    def __init__(
        self,
        policy: Callable[..., Any],
        obs_space: Spaces,
        env: Any,
        *,
        action_bounds: Bounds | Mapping[str, Bounds] | None = None,
        image_layout: Asked = None,
    ) -> None:
        self._policy = policy
        self._translation = GymTranslation(env.observation_space, env.action_space, image_layout)
        self._scale, _ = affine_actions(self._translation.act_space, action_bounds)
        self._sizes: dict[str, Any] = {}
        self._state: Any = None
        given = self._translation.obs_space
        for key, trained in obs_space.items():
            if key not in given:
                raise SpaceError(
                    f"The policy was trained on {', '.join(obs_space)}, and this environment gives "
                    f"{', '.join(given)}: wrap it so that it gives {key!r} too."
                )
            here = given[key].shape
            images = all(is_image(space.dtype, space.shape) for space in (given[key], trained))
            if images and here[2] == trained.shape[2]:
                self._sizes[key] = trained.shape[:2]
            elif here != trained.shape:
                raise SpaceError(
                    f"{key!r} has shape {here} here, and the policy was trained with "
                    f"{trained.shape}."
                )

    def reset(self) -> None:
        """Start a new episode with the next observation."""
        self._state = None

    def __call__(self, observation: Any) -> Any:
        obs = self._translation.observe(observation)
        obs |= {key: resize(obs[key], size) for key, size in self._sizes.items()}
        action, self._state = self._policy(obs, self._state)
        scaled = {key: scale(action[key]) for key, scale in self._scale.items()}
        return self._translation.act({**action, **scaled})


def constructors() -> dict[str, Callable[..., Env]]:
    """What makes the tasks of this suite, by name."""
    lanes_only: Any = {"vectorization": "vector_entry_point"}
    return {
        name: functools.partial(_make, name, **({} if spec.entry_point else lanes_only))
        for name, spec in gymnasium.registry.items()
    }


def _make(
    name: str,
    *,
    seed: int = 0,
    obs: Observe = "state",
    render: bool = False,
    image_layout: Asked = None,
    info_mask: bool = False,
    log_info: str | tuple[str, ...] | None = None,
    vectorization: Vectorization | bool = False,
    num_envs: int = 1,
    **options: Any,
) -> Any:
    read: dict[str, Any] = {"seed": seed, "image_layout": image_layout, "log_info": log_info}
    try:
        if vectorization:
            from dreamfleet.envs.lanes import VectorLanes

            if obs != "state":
                raise ConfigError(
                    f"obs={obs} is for single environments: leave it or vectorization out."
                )
            options |= _rendering() if render else {}
            mode = None if vectorization is True else vectorization
            wrappers: dict[str, Any] = {"wrappers": [MaskFromInfo]} if info_mask else {}
            lanes = gymnasium.make_vec(name, num_envs, mode, **wrappers, **options)
            return VectorLanes(lanes, num_envs, **read)
        spec = gymnasium.spec(name)
        entry = spec.entry_point
        creator: Any = entry if callable(entry) else load_env_creator(str(entry))
        known = inspect.signature(creator).parameters
        suite = inspect.signature(_make).parameters.keys() - {"name", "seed", "num_envs", "options"}
        own = {*known, *suite, "max_episode_steps"} - {"render_mode"}
        check_options(f"gym:{name}", known, options, {*spec.kwargs, "render_mode"}, own)
        # An environment that cannot render is played without frames, unless they are observed.
        renders = "render_mode" in known or takes_anything(known)
        if (render and renders) or obs != "state":
            options |= _rendering()
        # Gymnasium's checker costs more than a small environment's step; `AgentEnv` checks anyway.
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingExtraError(f"gym:{name} cannot be made here: {error}") from error
    except TypeError as error:
        if "must inherit from the gymnasium.Env" not in str(error):
            raise
        raise _old_interface(name, "it does not inherit from gymnasium.Env") from error
    return GymEnv(MaskFromInfo(env) if info_mask else env, obs=obs, **read)


def _rendering() -> dict[str, str]:
    """The option with which frames are rendered. Keeps pygame, which many environments use for it,
    from looking for a screen and speakers."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    return {"render_mode": "rgb_array"}


def _only_number(reward: Any) -> float:
    """The reward in an array of one element, as some environments return it."""
    if np.size(reward) == 1 and np.asarray(reward).dtype.kind in "biuf":
        return float(np.asarray(reward).item())
    raise SpaceError(f"The reward is {reward!r:.100}: return one number.")


def _check_reset(env: Any) -> None:
    """Refuse an environment that cannot be reset as Gymnasium does."""
    if callable(env.observation_space):
        raise EnvError(
            f"{type(env).__name__} is an environment of several agents, which is not supported: "
            "return one with an observation_space and an action_space, not methods of that name."
        )
    # A wrapper has Gymnasium's interface even around an environment that does not.
    inner = getattr(env, "unwrapped", env)
    try:
        parameters = inspect.signature(inner.reset).parameters
    except ValueError:  # compiled code without a signature
        return
    if "seed" not in parameters and not takes_anything(parameters):
        raise _old_interface(env, "its reset takes no seed")


def reset_result(env: Any, result: Any) -> tuple[Any, Any]:
    """Observation and info of a reset."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _old_interface(env, "its reset returns no pair of observation and info")
    return result


def _old_interface(env: Any, how: str) -> EnvError:
    name = env if isinstance(env, str) else type(getattr(env, "unwrapped", env)).__name__
    return EnvError(
        f"{name} has the interface of the old gym ({how}): change it to Gymnasium's, where "
        "reset(seed=None, options=None) returns observation and info and step returns five values, "
        "or wrap it in GymV21CompatibilityV0 of the package shimmy."
    )


# --- spaces ---------------------------------------------------------------------------------------


def _leaves(space: Any, role: str, path: _Path = ()) -> dict[_Path, Any]:
    """The spaces inside Dict and Tuple spaces by their path, which is empty for any other space."""
    inner = _inner(space)
    if inner is None:
        return {path: space}
    result: dict[_Path, Any] = {}
    for name, part in inner.items():
        result |= _leaves(part, role, (*path, name))
    if not result:
        raise SpaceError(
            f"The {role} space is an empty {type(space).__name__}: there is nothing in it."
        )
    return result


def _inner(space: Any) -> Mapping[Any, Any] | None:
    """The spaces in a Dict by name, those in a Tuple by number; None for any other space."""
    if type(space).__name__ == "Tuple":
        return dict(enumerate(space.spaces))
    spaces = getattr(space, "spaces", None)
    return spaces if isinstance(spaces, Mapping) else None


def _joined(path: _Path) -> str:
    return "/".join(map(str, path))


def _observation(space: Any, key: str, *, inside: bool) -> tuple[Space, Read]:
    """All but Box."""
    kind = type(space).__name__
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
        return target, lambda value: as_dtype(key, value - start, target.dtype)
    if kind == "MultiBinary":
        return Space(bool, space.shape), lambda value: np.asarray(value, bool)
    wrapper = "FilterObservation, which leaves it out" if inside else "TransformObservation"
    if kind in ("Text", "OneOf"):
        wrapper = "FlattenObservation"
    raise _unsupported(f"Observation {key!r} is a {kind} space", wrapper)


def _action(space: Any, key: str, *, batched: bool) -> tuple[Space, Callable[[Any], Any]]:
    kind, dtype = type(space).__name__, space.dtype
    if 0 in (space.shape or ()):
        raise SpaceError(f"Action {key!r} has shape {space.shape}: leave it out of the space.")
    if kind == "Box" and np.dtype(dtype).kind == "f":
        target = Space(np.float32, space.shape, space.low, space.high)
        return target, lambda value: np.asarray(value, dtype)
    if kind == "MultiBinary":
        return Space(np.int32, space.shape, 0, 2), lambda value: np.asarray(value, dtype)
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
    # In floats, because the difference of two integers may overflow.
    elif kind == "Box" and np.all(space.high.astype(float) - space.low < MOST_CLASSES):
        start = space.low.astype(np.int64)
        target = Space(np.int32, space.shape, 0, space.high.astype(np.int64) - start + 1)
    else:
        kind = f"{kind} space" if kind != "Box" else f"Box of more than {MOST_CLASSES} integers"
        raise _unsupported(f"Action {key!r} is a {kind}", "TransformAction")
    if kind == "Discrete" and not batched:
        # A plain integer: environments use it as an index or a dictionary key.
        return target, lambda value: int(value) + start
    return target, lambda value: np.asarray(value + start, dtype)


def _discrete(space: Any) -> tuple[Space, Any]:
    if type(space).__name__ == "Discrete":
        return Space(np.int32, (), 0, int(space.n)), int(space.start)
    start = np.asarray(getattr(space, "start", 0), np.int64)
    return Space(np.int32, space.nvec.shape, 0, space.nvec), start


def _unsupported(what: str, wrapper: str) -> SpaceError:
    return SpaceError(
        f"{what}, which no agent supports: write a factory that returns the environment in "
        f"gymnasium.wrappers.{wrapper}; agents take Box, Discrete, MultiDiscrete, MultiBinary, and "
        "Dict and Tuple of these."
    )
