"""Vectorised environments: one environment with N lanes, each with episodes of its own.

The contract is that of a single environment (`dreamfleet.envs.base`) with a leading axis:

    obs = env.step({**actions, "reset": reset})   # arrays of [N, ...] in and out
    rows = env.present                            # [N], the lanes that have an observation

Spaces are those of one lane. A lane that is not `present` has no observation now; its rows mean
nothing. It keeps the action that it was given, and its next action is ignored. An action of `reset`
alone resets every lane.

Lanes are absent because Gymnasium's vector environments step all lanes at once. How an episode ends
depends on their autoreset mode:

    NEXT_STEP  the step after the last one resets the lane and ignores its action: no lane waits
    SAME_STEP  the last step also resets: `final_obs` is the last observation. The first one of the
               next episode is sent on the next step, while the lanes that go on wait
    DISABLED   lanes are reset with `reset_mask`, while the lanes that go on wait

A reset in the middle of an episode also uses `reset_mask`. Where a library does not have it, the
lane plays on with actions of zeros, unseen, until its episode ends; if all lanes do, all are reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from dreamfleet.envs.base import Arrays, Env, EnvError, NotFiniteError, with_reserved
from dreamfleet.envs.gym import GymTranslation, InfoLog, loggable_number, reset_result
from dreamfleet.envs.layouts import Asked
from dreamfleet.envs.wrappers import AgentEnv, Bounds, Wrapper
from dreamfleet.errors import ConfigError
from dreamfleet.spaces import RESET, without_reset

Mask = NDArray[np.bool_]

_MISSING = np.float32(-np.inf)  # of a number that is only logged
# Libraries whose own vector environments take `reset_mask` in every autoreset mode.
_TAKE_MASKS = ("ale_py", "envpool")


class VectorLanes:
    """The lanes of a Gymnasium vector environment, with actions in its own units.

    Args:
        env: The vector environment.
        lanes: How many lanes it has to have.
        seed: Of the first reset.
        image_layout, log_info: As for `make_env`.

    Raises:
        EnvError: It is no vector environment of so many lanes, or does not say how it resets.
        SpaceError: A space that no agent supports.
    """

    def __init__(
        self,
        env: Any,
        lanes: int,
        *,
        seed: int = 0,
        image_layout: Asked = None,
        log_info: str | Sequence[str] | None = None,
    ) -> None:
        self.env, self.lanes = env, lanes
        self._mode, base = _check(env, lanes), getattr(env, "unwrapped", env)
        roots = {each.__module__.partition(".")[0] for each in type(base).__mro__}
        self._takes_mask = (
            self._mode is AutoresetMode.DISABLED
            or isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
            or not roots.isdisjoint(_TAKE_MASKS)
        )
        # EnvPool is seeded when it is made, and warns about any other seed.
        self._seed: int | None = None if "envpool" in roots else seed
        self._translation = translation = GymTranslation(
            env.single_observation_space, env.single_action_space, image_layout, batched=True
        )
        self._info = InfoLog(env, log_info, translation.obs_space)
        own = {**translation.obs_space, **self._info.spaces}
        self.obs_space, self.act_space = with_reserved(own, translation.act_space)
        self.notes, self.unlogged = translation.notes, self._info.unlogged
        self.present: Mask = np.ones(lanes, bool)
        """Which lanes have an observation."""
        self._limit = 0
        self._taken = np.zeros(lanes, np.int64)  # actions in this episode
        self._over: Mask = np.ones(lanes, bool)  # whose next observation is a first one
        self._ended: Mask = np.zeros(lanes, bool)  # that the library resets at its next step
        self._unseen: Mask = np.zeros(lanes, bool)  # that play on until their episode ends
        self._waiting: Mask = np.zeros(lanes, bool)  # whose first observation is in `_first`
        self._first: Arrays = {}
        self._actions: Arrays = {
            key: np.zeros((lanes, *space.shape), space.dtype)
            for key, space in without_reset(self.act_space).items()
        }
        self._started = False

    def limit_time(self, limit: int) -> None:
        """End episodes after so many actions, as last but not terminal."""
        if limit and not self._takes_mask:
            raise ConfigError(
                f"time_limit needs resets of single lanes, which {type(self.env).__name__} does "
                "not have: limit the episodes in the factory (gym: tasks: max_episode_steps)."
            )
        self._limit = limit

    def step(self, action: Mapping[str, Any]) -> Arrays:
        wanted = self._over | (np.asarray(action[RESET], bool) & self.present)
        if len(action) == 1 or not self._started:
            return self._reset_all()
        given = {key: np.asarray(action[key]) for key in self._actions}
        self._actions = given if self.present.all() else _mixed(self._actions, given, self.present)
        # In the middle of an episode, as far as the library knows.
        middle = wanted & ~self._ended & ~self._waiting & ~self._unseen
        firsts = wanted & self._waiting
        if middle.any() and not self._takes_mask:
            self._unseen, self._over = self._unseen | middle, self._over | middle
            if self._unseen.all():
                return self._reset_all()
            self._actions = _replaced(self._actions, middle, dict.fromkeys(self._actions, 0))
            middle = np.zeros_like(middle)
        if middle.any() or firsts.any():
            return self._begin(middle, firsts)
        return self._advance()

    def _reset_all(self) -> Arrays:
        seed, self._seed, self._started = self._seed, None, True
        result = self.env.reset(**({} if seed is None else {"seed": seed}))
        self._ended, self._unseen, self._waiting = (np.zeros(self.lanes, bool) for _ in range(3))
        obs = self._observe(*reset_result(self.env, result))
        return self._send_firsts(obs, np.ones(self.lanes, bool))

    def _begin(self, reset: Mask, firsts: Mask) -> Arrays:
        """Send first observations, and let the other lanes wait."""
        obs = self._first
        if reset.any():
            begun = self._observe(*self.env.reset(options={"reset_mask": reset.copy()}))
            if len(next(iter(begun.values()))) < self.lanes:  # EnvPool returns those it has reset
                zeros = {k: np.zeros((self.lanes, *v.shape[1:]), v.dtype) for k, v in begun.items()}
                begun = _replaced(zeros, reset, begun)
            obs = _mixed(begun, self._first, firsts) if firsts.any() else begun
        self._waiting = self._waiting & ~firsts
        return self._send_firsts(obs, reset | firsts)

    def _send_firsts(self, obs: Arrays, rows: Mask) -> Arrays:
        self._over = self._over & ~rows
        self._taken[rows] = 0
        self.present = rows
        zeros = np.zeros(self.lanes, bool)
        flags = {"is_first": rows, "is_last": zeros, "is_terminal": zeros}
        return {**obs, "reward": np.zeros(self.lanes, np.float32), **flags}

    def _advance(self) -> Arrays:
        """Step all lanes."""
        native = self._translation.act(self._actions)
        observation, reward, terminated, truncated, info = self.env.step(native)
        obs = self._observe(observation, info)
        first = self._ended
        # Some libraries return arrays that they write to again.
        terminal = np.array(terminated, bool) & ~first
        done = (terminal | np.asarray(truncated, bool)) & ~first
        self._taken = np.where(first, 0, self._taken + 1)
        over = done | (self._taken >= self._limit) if self._limit else done
        if self._mode is AutoresetMode.NEXT_STEP:
            self._ended = done
        elif self._mode is AutoresetMode.SAME_STEP and done.any():
            begun, obs = obs, self._last_obs(obs, info, done)
            # Lanes whose first observation still waits are those that are done now.
            self._first, self._waiting = begun, done
        self.present = seen = ~self._unseen | first
        # With SAME_STEP the first observation is sent next.
        self._unseen = self._unseen & ~(done if self._mode is AutoresetMode.SAME_STEP else first)
        self._over = np.where(seen, over, self._over)
        values = np.where(first, np.float32(0), np.asarray(reward, np.float32).reshape(self.lanes))
        flags = {"is_first": first, "is_last": over, "is_terminal": terminal}
        return {**obs, "reward": values, **flags}

    def give_up(self, rows: Mask) -> None:
        """Send no observation of these lanes, and start a new episode in them."""
        self.present = self.present & ~rows
        self._over = self._over | rows

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> Arrays:
        obs = self._translation.observe(observation)
        return obs | self._info.read(info, partial(_numbers, len(next(iter(obs.values())))))

    def _last_obs(self, begun: Arrays, info: Mapping[str, Any], done: Mask) -> Arrays:
        """The observations of this step: `final_obs` in lanes whose episode has ended."""
        final, rows = info.get("final_obs"), np.flatnonzero(done)
        by_lane = isinstance(final, np.ndarray) and final.dtype == object  # None in other lanes
        if final is None or (by_lane and any(final[row] is None for row in rows)):
            raise EnvError(
                f"{type(self.env).__name__} resets in the same step and returns no final_obs: "
                "return it in info, or use the autoreset mode NEXT_STEP."
            )
        if by_lane:
            space = self.env.single_observation_space
            batch: Any = create_empty_array(space, len(rows))
            last = self._translation.observe(
                concatenate(space, [final[row] for row in rows], batch)
            )
        else:  # of all lanes
            last = {k: value[rows] for k, value in self._translation.observe(final).items()}
        about = info.get("final_info")
        logs = self._info.read(info if about is None else about, partial(_numbers, self.lanes))
        return _replaced(begun, rows, last | {key: value[rows] for key, value in logs.items()})

    def render(self) -> NDArray[np.uint8] | None:
        """The frame of the first lane."""
        if getattr(self.env, "render_mode", None) != "rgb_array":
            return None
        frames = self.env.render()
        return None if frames is None else np.asarray(frames[0], np.uint8)

    def close(self) -> None:
        self.env.close()


class OneLane(Wrapper):
    """The only lane of a vectorised environment, as a single environment."""

    def __init__(self, lanes: VectorLanes) -> None:
        super().__init__(cast(Env, lanes))

    def step(self, action: Mapping[str, Any]) -> Arrays:
        obs = self.env.step({key: np.asarray(value)[None] for key, value in action.items()})
        return {key: np.array(value[0]) for key, value in obs.items()}


class Lanes(AgentEnv):
    """Lanes as agents take them. One with NaN or infinity sends no observation, and starts a new
    episode."""

    def __init__(
        self,
        lanes: VectorLanes,
        size: tuple[int, int] | None = None,
        action_bounds: Bounds | Mapping[str, Bounds] | None = None,
    ) -> None:
        super().__init__(cast(Env, lanes), size, action_bounds, lanes=(lanes.lanes,))
        self._vector, self.lanes = lanes, lanes.lanes
        self.not_finite: NotFiniteError | None = None
        """NaN or infinity in the last step."""

    @property
    def present(self) -> Mask:
        """Which lanes have an observation."""
        return self._vector.present

    @property
    def reset_action(self) -> Arrays:
        """The action that resets every lane."""
        return {RESET: np.ones(self.lanes, bool)}

    def step(self, action: Mapping[str, Any]) -> Arrays:
        self.not_finite = None
        obs = super().step(action)
        if np.minimum.reduce(obs["reward"]) == -np.inf:  # a reward is never missing
            self._not_finite("reward", -obs["reward"])
        return obs

    def _not_finite(self, key: str, value: NDArray[Any]) -> None:
        bad = ~(value.reshape(self.lanes, -1).max(1) < np.inf) & self.present
        if bad.any():
            which = ", ".join(map(str, np.flatnonzero(bad)[:5]))
            self._vector.give_up(bad)
            self.not_finite = NotFiniteError(
                f"Observation {key!r} holds NaN or infinity in lane {which}: the environment has "
                "to return finite numbers (-inf alone may mark a missing value).",
                key,
            )

    def _check_bounds(self, obs: Arrays) -> None:
        super()._check_bounds({key: value[self.present] for key, value in obs.items()})


def _check(env: Any, lanes: int) -> AutoresetMode:
    """The autoreset mode of a vector environment; refuses anything else."""
    name = type(env).__name__
    for attribute in ("num_envs", "single_observation_space", "single_action_space", "step"):
        if not hasattr(env, attribute):
            raise EnvError(
                f"{name} has no {attribute}, so it is not a vector environment: return a "
                "gymnasium.vector.VectorEnv, or give the factory no parameter num_envs."
            )
    if env.num_envs != lanes:
        raise EnvError(
            f"{name} has {env.num_envs} environments, and {lanes} were asked for: make as many as "
            "the factory's parameter num_envs says."
        )
    found = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    try:
        return AutoresetMode(found)
    except ValueError:
        raise EnvError(
            f"{name} does not say how its episodes end: set metadata['autoreset_mode'] to a value "
            "of gymnasium.vector.AutoresetMode."
        ) from None


def _numbers(lanes: int, info: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """A number of each lane from `info`; -inf where it is missing."""
    given = info.get(name)
    if given is None or np.shape(given)[:1] != (lanes,):
        return np.full(lanes, _MISSING)
    values, there = np.asarray(given), info.get(f"_{name}")
    if values.dtype.kind not in "biuf" or values.ndim > 1:
        numbers = np.array([loggable_number(value) for value in given], np.float32)
    else:
        numbers = values.astype(np.float32)
        numbers[~(np.abs(numbers) < 1e18)] = _MISSING
    return numbers if there is None else np.where(there, numbers, _MISSING)


def _mixed(one: Arrays, other: Arrays, rows: Mask) -> Arrays:
    """Some rows of the other arrays among those of the one."""
    return _replaced(one, rows, {key: other[key][rows] for key in one})


def _replaced(arrays: Arrays, rows: NDArray[Any], values: Mapping[str, Any]) -> Arrays:
    """Copies of arrays with other values in some rows."""
    copies = {key: np.array(arrays[key]) for key in values}
    for key, value in values.items():
        copies[key][rows] = value
    return {**arrays, **copies}
