"""Wrappers: each takes any `Env` and is one."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dreamfleet.envs.base import RESERVED, Arrays, Env, NotFiniteError, Spaces
from dreamfleet.envs.images import resize
from dreamfleet.envs.layouts import UINT8, Asked, Read, arranged, as_dtype
from dreamfleet.errors import ConfigError
from dreamfleet.masks import ACTION_MASK, ActionMask
from dreamfleet.spaces import RESET, Space, SpaceError

Bounds = tuple[float, float]
"""The lowest and the highest value."""
# Some environments write the largest float where they mean that there is no bound.
_UNBOUNDED = 1e18
_BOUNDS_CHECKED = 200  # steps


class Wrapper:
    """Changes nothing; the base of all wrappers."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self._obs_space, self._act_space = env.obs_space, env.act_space
        notes = getattr(env, "notes", None)
        self.notes = [str(note) for note in notes] if isinstance(notes, list) else []
        """What was recognised or assumed about the environment, a sentence each."""
        self.unlogged: list[str] = getattr(env, "unlogged", [])
        """Names in `info` that start with log/ and are not among the observations."""

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        return self._act_space

    def step(self, action: Mapping[str, Any]) -> Arrays:
        return self.env.step(action)

    def render(self) -> NDArray[np.uint8] | None:
        render = getattr(self.env, "render", None)
        return render() if render else None

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.env, "action_names", ()))

    def restore(self, obs: Mapping[str, Any]) -> bool:
        restore = getattr(self.env, "restore", None)
        return bool(restore and restore(obs))

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close:
            close()


class TimeLimit(Wrapper):
    """Ends an episode after `limit` actions, as last but not terminal."""

    def __init__(self, env: Env, limit: int) -> None:
        super().__init__(env)
        self._limit, self._taken, self._over = limit, 0, True

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if self._over and not action[RESET]:
            action = {**action, RESET: np.array(True)}
        obs = self.env.step(action)
        self._taken = 0 if obs["is_first"] else self._taken + 1
        if self._taken >= self._limit:
            obs = {**obs, "is_last": np.array(True)}
        self._over = bool(obs["is_last"])
        return obs


class ActionRepeat(Wrapper):
    """Takes every action `repeat` times and sums the rewards. Other keys are of the last step.

    Stops early when the mask forbids the action.
    """

    def __init__(self, env: Env, repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat
        self._mask = ActionMask.of(env.obs_space, env.act_space)

    def step(self, action: Mapping[str, Any]) -> Arrays:
        reward = 0.0
        for _ in range(self._repeat):
            obs = self.env.step(action)
            if obs["is_first"]:  # after a reset
                return obs
            reward += float(obs["reward"])
            if obs["is_last"]:
                break
            mask = self._mask
            if mask and not mask.allows(np.asarray(obs[ACTION_MASK]), action[mask.name]):
                break
        return {**obs, "reward": np.array(reward, np.float32)}


class AgentEnv(Wrapper):
    """An environment as agents take it.

    Observations: floats become float32, integers int32, bool and uint8 stay. Floats are refused
    where the space says integers. Keys, shapes, NaN and infinity are checked on every step, bounds
    on the first 200 steps only: enough to find a wrong declaration.

    Actions: continuous ones run from -1 to 1, are clipped, and mapped to the environment's bounds,
    as in `affine_actions`. All are cast to the environment's dtypes.

    Args:
        env: The environment.
        size: Height and width of all images.
        action_bounds: Where continuous actions have none.
        arrange: Whether images are to be brought to uint8 (height, width, channels).
        image_layout: How they are arranged, as for `make_env`.
        lanes: The leading axis of a vectorised environment.
    """

    def __init__(
        self,
        env: Env,
        size: tuple[int, int] | None = None,
        action_bounds: Bounds | Mapping[str, Bounds] | None = None,
        *,
        arrange: bool = False,
        image_layout: Asked = None,
        lanes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(env)
        check_declaration(env.obs_space, env.act_space)
        self._remaining, self._lanes = _BOUNDS_CHECKED, lanes
        readers: dict[str, tuple[Space, Read]] = {}
        if arrange:
            own = {key: space for key, space in env.obs_space.items() if key not in RESERVED}
            readers, notes = arranged(own, image_layout)
            self.notes += notes
        if ActionMask.of(env.obs_space, env.act_space):
            self.notes.append(f"Actions are masked by the observation {ACTION_MASK!r}.")
        self._obs_space = {}
        # Of each observation: dtype, shape, whether it may hold NaN, and a conversion.
        self._expected: dict[str, tuple[Any, tuple[int, ...], bool, Read | None]] = {}
        for key, given in env.obs_space.items():
            space, read = readers.get(key, (_unified(given), None))
            if size and space.image:
                space = Space(np.uint8, (*size, space.shape[2]))
                read = functools.partial(_resized, key, read, size)
            self._obs_space[key] = space
            self._expected[key] = space.dtype, (*lanes, *space.shape), not space.discrete, read
        self._affine, assumed = affine_actions(env.act_space, action_bounds)
        self.notes += assumed
        self._act_space = {
            key: Space(np.float32, space.shape, -1, 1) if key in self._affine else _unified(space)
            for key, space in env.act_space.items()
        }
        self._native: dict[str, Read] = {
            key: self._affine.get(key) or functools.partial(np.asarray, dtype=space.dtype)
            for key, space in env.act_space.items()
            if key in self._affine or space.dtype != self.act_space[key].dtype
        }

    @property
    def native_bounds(self) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        """What -1 and 1 stand for, by continuous action."""
        ones = {key: np.ones(self.act_space[key].shape) for key in self._affine}
        return {key: (to(-ones[key]), to(ones[key])) for key, to in self._affine.items()}

    def step(self, action: Mapping[str, Any]) -> Arrays:
        if self._remaining > 0 and not self._lanes:
            self._check_action(action)
        if self._native and len(action) > 1:  # lanes are also given a reset alone
            native = {key: convert(action[key]) for key, convert in self._native.items()}
            action = {**action, **native}
        given = self.env.step(action)
        if given.keys() != self._expected.keys():
            self._refuse_keys(given)
        obs: Arrays = {}
        for key, (dtype, shape, continuous, read) in self._expected.items():
            value = given[key]
            if read is not None:
                value = read(value)
            elif type(value) is not np.ndarray or value.dtype != dtype:
                value = as_dtype(key, value, dtype)
            if value.shape != shape:
                raise SpaceError(
                    f"Observation {key!r} has shape {value.shape}, but the space says {shape}: "
                    f"correct obs_space[{key!r}] or the value."
                )
            # NaN propagates to the maximum and compares false; minus infinity may mark a missing
            # value. The ufunc is several times faster than the method `max`.
            if continuous and not (
                float(value if value.ndim == 0 else np.maximum.reduce(value, None)) < math.inf
            ):
                self._not_finite(key, value)
            obs[key] = value
        if not self._lanes and float(obs["reward"]) == -math.inf:  # a reward is never missing
            raise NotFiniteError("The reward is -inf: return a finite number.", "reward")
        if self._remaining > 0:
            self._remaining -= 1
            self._check_bounds(obs)
        return obs

    def _not_finite(self, key: str, value: NDArray[Any]) -> None:  # noqa: ARG002 - of lanes
        raise NotFiniteError(
            f"Observation {key!r} holds NaN or infinity: the environment must return finite "
            "numbers (-inf alone may mark a missing value).",
            key,
        )

    def _check_action(self, action: Mapping[str, Any]) -> None:
        for key, space in self.act_space.items():
            if key not in action:
                raise SpaceError(
                    f"The action lacks {key!r}: it needs the keys {sorted(self.act_space)}."
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
        for key, space in self.obs_space.items():
            value = obs[key]
            above = value >= space.high if space.discrete else value > space.high
            if not np.any(above | (value < space.low)) or np.any(np.isneginf(value)):
                continue
            raise SpaceError(
                f"Observation {key!r} runs from {value.min()} to {value.max()}, outside its space "
                f"{space}: widen obs_space[{key!r}] or clip the value."
            )

    def _refuse_keys(self, obs: Arrays) -> None:
        if missing := sorted(self._expected.keys() - obs.keys()):
            raise SpaceError(
                f"The observation lacks {missing[0]!r}, which obs_space declares: return it on "
                "every step or take it out of obs_space."
            )
        raise SpaceError(
            f"The observation holds {min(obs.keys() - self._expected.keys())!r}, which obs_space "
            "does not declare: add it to obs_space or do not return it."
        )


def check_declaration(obs_space: Mapping[str, Space], act_space: Mapping[str, Space]) -> None:
    """Refuse spaces that break the contract."""
    for key, expected in RESERVED.items():
        if key not in obs_space:
            raise SpaceError(
                f"obs_space lacks {key!r}: add Space({expected.dtype}) and return it on each step."
            )
        given = obs_space[key]
        if given.shape != () or given.dtype != expected.dtype:
            raise SpaceError(
                f"obs_space[{key!r}] is {given}, but must be a scalar of dtype {expected.dtype}."
            )
    if act_space.get(RESET) != Space(bool):
        raise SpaceError("act_space needs the key 'reset' with Space(bool).")
    if len(act_space) == 1:
        raise SpaceError("act_space holds 'reset' only: add at least one action.")


def _resized(key: str, read: Read | None, size: tuple[int, int], value: Any) -> NDArray[np.uint8]:
    return resize(read(value) if read else as_dtype(key, value, UINT8), size)


def _unified(space: Space) -> Space:
    if space.dtype.kind == "f":
        # Rounded as the values, so that a value on its bound stays inside.
        with np.errstate(over="ignore"):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return Space(np.float32, space.shape, low, high)
    if space.dtype == np.uint8 or space.dtype.kind == "b":
        return space
    info = np.iinfo(np.int32)
    low, high = np.maximum(space.low, info.min), np.minimum(space.high, info.max)
    return Space(np.int32, space.shape, low, high)


def affine_actions(
    act_space: Spaces, bounds: Bounds | Mapping[str, Bounds] | None = None
) -> tuple[dict[str, Read], list[str]]:
    """Functions that map each continuous action from -1..1 to its own bounds, and a note for each
    assumed bound. A missing bound is -1 or 1, or 1 beyond the other bound if that lies further out.

    Args:
        act_space: The actions.
        bounds: What missing bounds are instead, for all or by key.

    Raises:
        ConfigError: `bounds` are given for an action that has bounds.
    """
    missing = {
        key: np.stack([space.low < -_UNBOUNDED, space.high > _UNBOUNDED])
        for key, space in act_space.items()
        if not space.discrete
    }
    lacking = [key for key, where in missing.items() if where.any()]
    named = list(bounds) if isinstance(bounds, Mapping) else lacking if bounds else []
    if bounds is not None and (not named or set(named) - set(lacking)):
        wrong = next((key for key in named if key not in lacking), "")
        these = f"action {wrong!r} is not one of them" if wrong else "there are none here"
        raise ConfigError(
            f"action_bounds is for continuous actions without bounds, and {these}: leave it out."
        )
    native: dict[str, Read] = {}
    notes = []
    for key, (below, above) in missing.items():
        space, given = act_space[key], bounds.get(key) if isinstance(bounds, Mapping) else bounds
        lowest: Any = given[0] if given else np.minimum(-1, np.where(above, 1, space.high) - 1)
        highest: Any = given[1] if given else np.maximum(1, np.where(below, -1, space.low) + 1)
        low, high = np.where(below, lowest, space.low), np.where(above, highest, space.high)
        if np.any(low > high) or (given and not given[0] < given[1]):
            raise ConfigError(
                f"action_bounds={list(given or ())} leaves nothing of action {key!r}, which is "
                f"{space}: give a low value and a higher one."
            )
        native[key] = _affine(low, high, space.dtype)
        if key in lacking and given is None:
            notes.append(_assumed(key, low, high, missing[key]))
    return native, notes


def _assumed(key: str, low: Any, high: Any, missing: NDArray[np.bool_]) -> str:
    """The note about assumed bounds."""
    where = missing.any(0)
    pairs = zip(low[where].flat, high[where].flat, strict=True)
    ranges = sorted({f"{a:g} to {b:g}" for a, b in pairs})
    some = "" if where.all() else f" in {where.sum()} of {where.size} dimensions"
    acts = ", ".join(ranges[:3]) + (", ..." if len(ranges) > 3 else "")
    lacks = "no bounds" if missing[:, where].all() else "a bound missing"
    return (
        f"Action {key!r} has {lacks}{some}: the agent acts within {acts}; the option "
        "action_bounds=[low,high] sets others."
    )


def _affine(low: NDArray[Any], high: NDArray[Any], dtype: Any) -> Read:
    """From -1..1 to these bounds."""
    center, half = (low + high) / 2, (high - low) / 2

    def convert(value: Any) -> NDArray[Any]:
        # Clipped before, because the agent's sample may lie outside, and after, because of
        # rounding. The ufuncs are faster than `np.clip`.
        mapped = center + np.minimum(np.maximum(value, -1.0), 1.0) * half
        bounded: NDArray[Any] = np.minimum(np.maximum(mapped, low), high)
        return bounded.astype(dtype)

    return convert
