"""Vectorised environments: every autoreset mode gives the streams of single environments."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from dreamfleet.envs import EnvError, make_env
from dreamfleet.envs.registry import is_vectorised, make_lanes
from dreamfleet.errors import ConfigError

LANES, SEED = 4, 7


class Walk(gymnasium.Env[Any, Any]):
    """Episodes of different lengths that terminate or are truncated, with a mask and info."""

    observation_space = spaces.Dict(
        place=spaces.Box(-1, 1, (3,), np.float64),
        board=spaces.Box(0, 3, (2, 2), np.int8),
        frame=spaces.Box(0, 255, (3, 16, 20), np.uint8),
        kind=spaces.Discrete(5, start=2),
        action_mask=spaces.MultiBinary(3),
    )
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, bad: int = 0, where: str = "place") -> None:
        self._bad, self._where = bad, where

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 9))
        return self._look(), {"fuel": float(self._left)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= int(action)
        over = self._left <= 0
        terminated = over and self.np_random.random() < 0.5
        info = {"is_success": bool(terminated)} if over else {"fuel": float(self._left)}
        bad = self._where == "reward" and self._bad and self._left == self._bad
        reward = -np.inf if bad else 0.5 * float(action)
        return self._look(), reward, terminated, over and not terminated, info

    def _look(self) -> dict[str, Any]:
        rng = self.np_random
        place = rng.uniform(-1, 1, 3)
        if self._where == "place" and self._bad and self._left == self._bad:
            place[0] = np.nan
        return {
            "place": place,
            "board": rng.integers(0, 4, (2, 2)).astype(np.int8),
            "frame": rng.integers(0, 256, (3, 16, 20)).astype(np.uint8),
            "kind": int(rng.integers(2, 7)),
            "action_mask": np.array([1, 1, self._left > 1], np.int8),
        }


class Push(gymnasium.Env[Any, Any]):
    """A single array, and continuous actions with bounds of their own."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(np.array([-3.0, 0.0]), np.array([5.0, 2.0]), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._place = self.np_random.normal(size=2).astype(np.float32)
        return self._place.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(np.asarray(action))
        self._place = (self._place + action + self.np_random.normal(size=2)).astype(np.float32)
        return self._place.copy(), float(action[0]), bool(abs(self._place[0]) > 6), False, {}


def vector(env: Any, mode: AutoresetMode, num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([env] * num_envs, autoreset_mode=mode)


def factory(env: Any, mode: AutoresetMode) -> Any:
    def make(num_envs: int) -> SyncVectorEnv:
        return vector(env, mode, num_envs)

    return make


def action_rows(rng: np.random.Generator, space: Any, mask: Any) -> Any:
    return {key: each.sample(rng) for key, each in space.items() if key != "reset"}


def single_streams(env: Any, steps: int, resets: set[int], **options: Any) -> list[list[Any]]:
    """What single environments observe: each has actions of its own, by the number of its step."""
    streams = []
    for lane in range(LANES):
        made = make_env(env, seed=SEED + lane, **options)
        rng, over, stream = np.random.default_rng(lane), True, []
        for number in range(steps):
            action = action_rows(rng, made.act_space, None)
            reset = over or (lane == 1 and number in resets)
            obs = made.step({**action, "reset": np.array(reset)})
            over = bool(obs["is_last"])
            stream.append(obs)
        streams.append(stream)
    return streams


def lane_streams(env: Any, steps: int, resets: set[int]) -> list[list[Any]]:
    rngs = [np.random.default_rng(lane) for lane in range(LANES)]
    streams: list[list[Any]] = [[] for _ in range(LANES)]
    over = np.ones(LANES, bool)
    space = {key: each for key, each in env.act_space.items() if key != "reset"}
    actions = {k: np.zeros((LANES, *s.shape), s.dtype) for k, s in space.items()}
    present = np.ones(LANES, bool)
    while min(map(len, streams)) < steps:
        reset = over.copy()
        for lane in np.flatnonzero(present):
            for key, value in action_rows(rngs[lane], env.act_space, None).items():
                actions[key][lane] = value
        reset[1] |= len(streams[1]) in resets
        obs = env.step({**{k: v.copy() for k, v in actions.items()}, "reset": reset})
        present = env.present.copy()
        for lane in np.flatnonzero(present):
            streams[lane].append({key: value[lane] for key, value in obs.items()})
        over = np.where(present, obs["is_last"], over)
    return streams


def assert_same(single: list[list[Any]], lanes: list[list[Any]], steps: int) -> None:
    for one, many in zip(single, lanes, strict=True):
        for number in range(steps):
            assert one[number].keys() == many[number].keys()
            for key, value in one[number].items():
                np.testing.assert_array_equal(value, many[number][key], f"{key} at {number}")
                assert value.dtype == many[number][key].dtype, key
    assert any(obs["is_terminal"] for stream in single for obs in stream)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("resets", [set(), {5, 12, 13}])
@pytest.mark.parametrize("env", [Walk, Push])
def test_streams_are_those_of_single_environments(env: Any, resets: Any, mode: Any) -> None:
    options = {"log_info": "fuel"} if env is Walk else {}
    single = single_streams(env, 60, resets, **options)
    lanes = make_lanes(factory(env, mode), LANES, seed=SEED, **options)
    assert lanes.obs_space == make_env(env, **options).obs_space
    assert lanes.act_space == make_env(env, **options).act_space
    assert_same(single, lane_streams(lanes, 60, resets), 60)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_time_limit_and_size(mode: AutoresetMode) -> None:
    options: dict[str, Any] = {"time_limit": 3, "size": (8, 8)}
    single = single_streams(Walk, 40, set(), **options)
    lanes = make_lanes(factory(Walk, mode), LANES, seed=SEED, **options)
    assert_same(single, lane_streams(lanes, 40, set()), 40)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_one_lane_is_a_single_environment(mode: AutoresetMode) -> None:
    one, many = make_env(Walk, seed=3), make_env(factory(Walk, mode), seed=3)
    rng, over = np.random.default_rng(0), True
    assert one.obs_space == many.obs_space
    for _ in range(50):
        action = {**action_rows(rng, one.act_space, None), "reset": np.array(over)}
        expected, found = one.step(action), many.step(action)
        for key, value in expected.items():
            np.testing.assert_array_equal(value, found[key], key)
        over = bool(expected["is_last"])


def test_gym_tasks() -> None:
    options = {"vectorization": "sync"}
    assert is_vectorised("gym:CartPole-v1", options)
    assert not is_vectorised("gym:CartPole-v1", {})
    single = single_streams("gym:CartPole-v1", 80, {3})
    lanes = make_lanes("gym:CartPole-v1", LANES, seed=SEED, **options)
    assert_same(single, lane_streams(lanes, 80, {3}), 80)


def test_lanes_without_reset_mask_play_on_unseen() -> None:
    lanes = make_lanes("gym:CartPole-v1", 2, seed=SEED, vectorization="vector_entry_point")
    zeros = {"action": np.zeros(2, np.int32)}
    lanes.step({**zeros, "reset": np.ones(2, bool)})
    lanes.step({**zeros, "reset": np.zeros(2, bool)})
    obs = lanes.step({**zeros, "reset": np.array([True, False])})
    assert lanes.present.tolist() == [False, True]
    for _ in range(30):
        obs = lanes.step({**zeros, "reset": obs["is_last"]})
        if lanes.present[0]:
            break
    assert obs["is_first"][0]
    assert np.all(np.abs(obs["vector"][0]) <= 0.05)
    obs = lanes.step(lanes.reset_action)
    assert obs["is_first"].all()
    assert lanes.present.all()
    with pytest.raises(ConfigError, match="resets of single lanes"):
        make_lanes("gym:CartPole-v1", 2, vectorization=True, time_limit=5)


@pytest.mark.parametrize("where", ["place", "reward"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_nan_costs_one_lane_its_episode(mode: AutoresetMode, where: str) -> None:
    def make(num_envs: int) -> SyncVectorEnv:
        envs = [partial(Walk, 1, where), *[Walk] * (num_envs - 1)]
        return SyncVectorEnv(envs, autoreset_mode=mode)

    lanes = make_lanes(make, 2, seed=SEED)
    over, cut, lost = np.ones(2, bool), False, 0
    for _ in range(200):
        obs = lanes.step({"action": np.zeros(2, np.int32), "reset": over})
        rows = lanes.present
        assert np.isfinite([obs["place"][rows].sum(), obs["reward"][rows].sum()]).all()
        if cut and rows[0]:
            assert obs["is_first"][0]
            cut = False
        if lanes.not_finite is not None:
            assert lanes.not_finite.key == where
            assert not rows[0]
            cut, lost = True, lost + 1
        over = np.where(rows, obs["is_last"], over) & rows
    assert lost > 3


class AllFinal(VectorEnv[Any, Any, Any]):
    """Returns `final_obs` of all lanes and no `final_info`, as the vector environment of ALE."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int) -> None:
        self.inner = vector(Push, AutoresetMode.SAME_STEP, num_envs)
        self.num_envs = num_envs
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space

    def reset(self, **options: Any) -> Any:
        return self.inner.reset(**options)

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self.inner.step(actions)
        final = obs.copy()
        for lane in np.flatnonzero(terminated | truncated):
            final[lane] = info["final_obs"][lane]
        done = (terminated | truncated).any()
        return obs, reward, terminated, truncated, {"final_obs": final} if done else {}


def test_final_obs_of_all_lanes() -> None:
    lanes = make_lanes(AllFinal, LANES, seed=SEED)
    assert_same(
        [
            [{k: v for k, v in obs.items() if not k.startswith("log/")} for obs in stream]
            for stream in single_streams(Push, 60, set())
        ],
        [
            [{k: v for k, v in obs.items() if not k.startswith("log/")} for obs in stream]
            for stream in lane_streams(lanes, 60, set())
        ],
        60,
    )


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="repeat cannot be applied"):
        make_env(AllFinal, repeat=2)
    with pytest.raises(ConfigError, match="set envs and envs_per_process"):
        make_env(AllFinal, num_envs=3)

    def wrong(num_envs: int) -> Any:
        return AllFinal(num_envs + 1)

    def no_vector(num_envs: int) -> Any:
        return Push()

    def no_mode(num_envs: int) -> Any:
        env = AllFinal(num_envs)
        env.metadata = {}
        return env

    for make, message in (
        (wrong, "has 2 environments, and 1 were asked for"),
        (no_vector, "has no num_envs, so it is not a vector environment"),
        (no_mode, "does not say how its episodes end"),
    ):
        with pytest.raises(EnvError, match=message):
            make_env(make)
    with pytest.raises(ConfigError, match="obs=pixels is for single environments"):
        make_env("gym:CartPole-v1", vectorization="sync", obs="pixels")


class Changed(AllFinal):
    """Returns something else than the vector environment inside."""

    def __init__(self, num_envs: int, mode: AutoresetMode, info: Any, reset: Any = None) -> None:
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": mode}
        self.inner = vector(Push, mode, num_envs)
        self._info, self._reset = info, reset or (lambda result: result)

    def reset(self, **options: Any) -> Any:
        return self._reset(self.inner.reset(**options))

    def step(self, actions: Any) -> Any:
        return (*self.inner.step(actions)[:4], self._info)


SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("info", [{}, {"final_obs": np.full(LANES, None)}])
def test_an_environment_without_final_obs_is_refused(info: Any) -> None:
    def make(num_envs: int) -> Any:
        return Changed(num_envs, SAME, info)

    with pytest.raises(EnvError, match="resets in the same step and returns no final_obs"):
        lane_streams(make_lanes(make, LANES, seed=SEED), 60, set())


def test_info_may_hold_any_name_and_a_reset_returns_a_pair() -> None:
    info = {3: np.zeros(LANES), "log/speed": np.ones(LANES), "log/text": np.full(LANES, "x")}

    def make(num_envs: int) -> Any:
        return Changed(num_envs, NEXT, info)

    def old(num_envs: int) -> Any:
        return Changed(num_envs, NEXT, info, lambda result: result[0])

    lanes = make_lanes(make, LANES, seed=SEED)
    lane_streams(lanes, 10, set())
    assert lanes.unlogged == ["log/speed"]
    with pytest.raises(EnvError, match="its reset returns no pair"):
        lane_streams(make_lanes(old, LANES, seed=SEED), 1, set())


def test_an_id_with_a_vector_environment_only() -> None:
    entry = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    gymnasium.register("OnlyVectorTest-v0", vector_entry_point=entry)
    assert is_vectorised("gym:OnlyVectorTest-v0", {})
    assert make_env("gym:OnlyVectorTest-v0").obs_space["vector"].shape == (4,)
