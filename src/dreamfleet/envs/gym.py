"""Gymnasium: `gym:ID` for any registered id, and the adapter for any Gymnasium environment.

A single observation is named `image` (see `layouts`) or `vector`, a single action `action`. The
keys of Dict and the numbers of Tuple spaces are joined with a slash. Discrete values start at 0,
whatever the start of the space is.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    UnknownTaskError,
)
from dreamfleet.envs.images import resize
from dreamfleet.envs.info_mask import MaskFromInfo
from dreamfleet.envs.layouts import (
    FLAT,
    Asked,
    as_integers,
    find_layout,
    layouts_asked,
    vector_note,
)
from dreamfleet.envs.registry import check_given, check_name
from dreamfleet.envs.wrappers import Bounds, affine_actions
from dreamfleet.errors import ConfigError, MissingExtraError
from dreamfleet.masks import ACTION_MASK
from dreamfleet.settings import load_module
from dreamfleet.spaces import LOG_PREFIX, Space, SpaceError, is_image

Observe = Literal["state", "pixels", "both"]
Vectorization = Literal["sync", "async", "vector_entry_point"]
# Names of nested Dict spaces, the outermost first. A name may hold slashes itself.
_Path = tuple[Any, ...]

# The agent gets an integer vector as one-hot codes, unless an element has more choices than this,
# or all its codes together are longer.
_MOST_CLASSES = 256
_MOST_INPUTS = 32_768

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
        self._readers: dict[str, tuple[_Path, Callable[[Any], NDArray[Any]]]] = {}
        self._writers: dict[_Path, tuple[str, Callable[[Any], Any]]] = {}
        self._action_space = action_space
        self.obs_space: Spaces = {}
        self.act_space: Spaces = {}
        self.notes: list[str] = []
        leaves = _leaves(observation_space, "observation")
        shapes = {_joined(path) or "vector": space.shape or () for path, space in leaves.items()}
        asked = layouts_asked(image_layout, shapes, names=("image", "vector"))
        for path, space in leaves.items():
            key = _joined(path) or "vector"
            if 0 in (space.shape or ()):
                self.notes.append(f"Observation {key!r} has shape {space.shape}: it is left out.")
                continue
            box, layout = type(space).__name__ == "Box", None
            if box:
                bounds = (space.low, space.high)
                layout = find_layout(key, space.dtype, space.shape, *bounds, asked.get(key, ""))
            if layout is None:
                flat = asked.get(key) == FLAT
                self.obs_space[key], read = _observation(space, key, inside=bool(path), flat=flat)
                if box and key not in asked:
                    self.notes.append(vector_note(key, space.dtype, space.shape))
            else:
                if not path:
                    key, layout = "image", replace(layout, key="image")
                self.obs_space[key], read = Space(np.uint8, layout.image), layout
                self.notes.append(layout.note)
            if key in self._readers:
                raise SpaceError(f"Two observations are named {key!r}: rename one of them.")
            self._readers[key] = path, read
        if not self._readers:
            raise SpaceError("The observation holds no number: there is nothing to learn from.")
        self.notes = [note for note in self.notes if note]
        for path, space in _leaves(action_space, "action").items():
            key = _joined(path) or "action"
            self.act_space[key], write = _action(space, key, batched=batched)
            self._writers[path] = key, write

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


class GymEnv(EpisodicEnv):
    """Any Gymnasium environment.

    `obs="pixels"` replaces the observations by rendered frames under the key `image`, "both"
    adds them; both need an environment with `render_mode="rgb_array"`. `image_layout` names the
    axes of images that are not recognised. `notes` say what was recognised.

    Numbers of `info` named `success`, `is_success` or in `log_info` become `log/NAME`, -inf where
    they are missing. `unlogged` holds other names that start with `log/`, which were not known when
    the environment was made.
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
        self._state = obs != "pixels"
        self._pixels = obs != "state"
        self._translation = translation = GymTranslation(
            env.observation_space, env.action_space, image_layout if self._state else None
        )
        self.notes = translation.notes if self._state else []
        # Frames do not say which actions are allowed.
        self._kept = [key for key in translation.obs_space if self._state or key == ACTION_MASK]
        obs_space = {key: translation.obs_space[key] for key in self._kept}
        if self._pixels:
            if "image" in obs_space:
                raise SpaceError(
                    "The environment has an observation 'image' already: use obs='state'."
                )
            env.reset(seed=seed)
            obs_space["image"] = Space(np.uint8, self._frame().shape)
        self._logged = logged_names(env, log_info, obs_space)
        self.unlogged: list[str] = []
        obs_space |= dict.fromkeys(self._logged, Space(np.float32))
        super().__init__(obs_space, translation.act_space)

    def _begin(self) -> Arrays:
        # Seeded once: seeding every reset would repeat the same episode.
        result = self.env.reset(seed=self._seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise _old_interface(self.env, "its reset returns no pair of observation and info")
        self._seed = None
        return self._observe(*result)

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
        observed = self._translation.observe(observation) if self._kept else {}
        result = {key: observed[key] for key in self._kept}
        if self._pixels:
            result["image"] = self._frame()
        if info:
            result |= {key: loggable_number(info.get(name)) for key, name in self._logged.items()}
            self._find_unlogged(info)
        elif self._logged:
            result |= dict.fromkeys(self._logged, _MISSING)
        return result

    def _find_unlogged(self, info: Mapping[Any, Any]) -> None:
        for name, value in info.items():
            if isinstance(name, str) and name.startswith(LOG_PREFIX):
                new = name not in self.obs_space and name not in self.unlogged
                room = len(self.unlogged) < _MOST_UNLOGGED
                if new and room and loggable_number(value) is not _MISSING:
                    self.unlogged.append(name)

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
        self._translation = translation = GymTranslation(
            env.observation_space, env.action_space, image_layout
        )
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
        """Start a new episode with the next observation."""
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
    """What makes a task of this suite. In `module:Id-v0` the module is imported first."""
    module, colon, short = name.rpartition(":")
    if colon:
        load_module(module, name)
    try:
        spec = gymnasium.spec(short)
    except gymnasium.error.Error:
        if not colon:
            return None
        close = difflib.get_close_matches(short, gymnasium.registry, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else "check the spelling."
        raise UnknownTaskError(f"The module {module!r} registers no {short}: {hint}") from None
    if spec.entry_point is None:  # there is a vector environment only
        return functools.partial(_make, short, vectorization="vector_entry_point")
    return functools.partial(_make, short)


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
    try:
        spec = gymnasium.spec(name)
        if vectorization:
            from dreamfleet.envs.lanes import VectorLanes

            if obs != "state":
                raise ConfigError(
                    f"obs={obs} is for single environments: leave it or vectorization out."
                )
            if render:
                options["render_mode"] = "rgb_array"
                _quiet_pygame()
            mode = None if vectorization is True else vectorization
            wrappers: dict[str, Any] = {"wrappers": [MaskFromInfo]} if info_mask else {}
            lanes = gymnasium.make_vec(name, num_envs, mode, **wrappers, **options)
            return VectorLanes(
                lanes, num_envs, seed=seed, image_layout=image_layout, log_info=log_info
            )
        entry = spec.entry_point
        creator: Any = entry if callable(entry) else load_env_creator(str(entry))
        known = inspect.signature(creator).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        suite = inspect.signature(_make).parameters.keys() - {"name", "seed", "num_envs", "options"}
        own = {*known, *suite, "max_episode_steps"} - {"render_mode"}
        for option in options if not anything else ():
            check_name(f"gym:{name}", option, own)
        check_given(f"gym:{name}", known, {*spec.kwargs, *options, "render_mode"})
        # An environment that cannot render is played without frames, unless they are observed.
        if (render and (anything or "render_mode" in known)) or obs != "state":
            options["render_mode"] = "rgb_array"
            _quiet_pygame()
        # Gymnasium's checker costs more than a small environment's step; CheckSpaces runs anyway.
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingExtraError(f"gym:{name} cannot be made here: {error}") from error
    except TypeError as error:
        if "must inherit from the gymnasium.Env" not in str(error):
            raise
        raise _old_interface(name, "it does not inherit from gymnasium.Env") from error
    masked = MaskFromInfo(env) if info_mask else env
    return GymEnv(masked, seed=seed, obs=obs, image_layout=image_layout, log_info=log_info)


def _quiet_pygame() -> None:
    """Keep pygame, which many environments render with, from looking for a screen and speakers."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _only_number(reward: Any) -> float:
    """The reward in an array of one element, as some environments return it."""
    if np.size(reward) == 1 and np.asarray(reward).dtype.kind in "biuf":
        return float(np.asarray(reward).item())
    raise SpaceError(f"The reward is {reward!r:.100}: return one number.")


def logged_names(
    env: Any, log_info: str | Sequence[str] | None, obs_space: Spaces
) -> dict[str, str]:
    """The names in `info` to log, by their key."""
    asked = (log_info,) if isinstance(log_info, str) else log_info or ()
    # Gymnasium's own environments report no success, and each key makes a step slower.
    spec, inner = getattr(env, "spec", None), getattr(env, "unwrapped", env)
    modules = {type(inner).__module__, str(getattr(spec, "entry_point", ""))}
    own = any(module.startswith("gymnasium.envs.") for module in modules)
    return {
        key: name
        for name in (*(() if own else _LOGGED), *asked)
        if (key := name if name.startswith(LOG_PREFIX) else LOG_PREFIX + name) not in obs_space
    }


def loggable_number(value: Any) -> NDArray[np.float32]:
    """A number to log; `_MISSING` for anything else."""
    if value is None or isinstance(value, (str, Mapping)) or np.size(value) != 1:
        return _MISSING
    array = np.asarray(value).reshape(())
    fits = array.dtype.kind in "biuf" and -_LARGEST_LOGGED < array < _LARGEST_LOGGED
    return array.astype(np.float32) if fits else _MISSING


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
    if "seed" not in parameters and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        raise _old_interface(env, "its reset takes no seed")


def _old_interface(env: Any, how: str) -> EnvError:
    name = env if isinstance(env, str) else type(getattr(env, "unwrapped", env)).__name__
    return EnvError(
        f"{name} has the interface of the old gym ({how}): change it to Gymnasium's, where "
        "reset(seed=None, options=None) returns observation and info and step returns five values, "
        "or wrap it in GymV21CompatibilityV0 of the package shimmy."
    )


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


def _observation(
    space: Any, key: str, *, inside: bool, flat: bool
) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    kind = type(space).__name__
    if kind == "Box":
        return _box(space, key, flat=flat)
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
        return target, lambda value: as_integers(key, value - start, np.int32)
    if kind == "MultiBinary":
        return Space(bool, space.shape), lambda value: np.asarray(value, bool)
    wrapper = "FilterObservation, which leaves it out" if inside else "TransformObservation"
    if kind in ("Text", "OneOf"):
        wrapper = "FlattenObservation"
    raise _unsupported(f"Observation {key!r} is a {kind} space", wrapper)


def _action(space: Any, key: str, *, batched: bool) -> tuple[Space, Callable[[Any], Any]]:
    kind = type(space).__name__
    dtype = space.dtype
    if 0 in (space.shape or ()):
        raise SpaceError(f"Action {key!r} has shape {space.shape}: leave it out of the space.")
    if kind == "Box" and np.dtype(dtype).kind == "f":
        return (
            Space(np.float32, space.shape, space.low, space.high),
            lambda value: np.asarray(value, dtype),
        )
    if kind == "Discrete" and not batched:
        target, start = _discrete(space)
        # A plain integer: environments use it as an index or a dictionary key.
        return target, lambda value: int(value) + start
    if kind in ("Discrete", "MultiDiscrete"):
        target, start = _discrete(space)
        return target, lambda value: np.asarray(value + start, dtype)
    if kind == "MultiBinary":
        return Space(np.int32, space.shape, 0, 2), lambda value: np.asarray(value, dtype)
    # In floats, because the difference of two integers may overflow.
    if kind == "Box" and np.all(space.high.astype(float) - space.low < _MOST_CLASSES):
        start = space.low.astype(np.int64)
        target = Space(np.int32, space.shape, 0, space.high.astype(np.int64) - start + 1)
        return target, lambda value: np.asarray(value + start, dtype)
    kind = f"{kind} space" if kind != "Box" else f"Box of more than {_MOST_CLASSES} integers"
    raise _unsupported(f"Action {key!r} is a {kind}", "TransformAction")


def _box(space: Any, key: str, *, flat: bool) -> tuple[Space, Callable[[Any], NDArray[Any]]]:
    """A Box without images."""
    dtype = np.dtype(space.dtype)
    shape = (int(np.prod(space.shape)),) if flat else space.shape
    with np.errstate(over="ignore"):
        low, high = (bound.reshape(shape).astype(np.float64) for bound in (space.low, space.high))
        classes = high - low + 1
    small = np.all(classes <= _MOST_CLASSES) and np.sum(classes) <= _MOST_INPUTS
    # More axes are for a custom encoder, and the default decoder predicts floats for them.
    if dtype.kind in "iub" and small and np.all(low >= 0) and len(shape) <= 2:
        target = Space(np.int32, shape, 0, high + 1)
        return target, lambda value: _reshaped(as_integers(key, value, np.int32), space, shape)
    with np.errstate(over="ignore"):
        low, high = low.astype(np.float32), high.astype(np.float32)
    target = Space(np.float32, shape, low, high)
    if shape == space.shape:
        return target, lambda value: np.asarray(value, np.float32)
    return target, lambda value: _reshaped(np.asarray(value, np.float32), space, shape)


def _reshaped(value: NDArray[Any], space: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A value of a space in another shape; a leading axis stays."""
    lead = value.shape[: max(0, value.ndim - len(space.shape))]
    return value.reshape((*lead, *shape))


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
