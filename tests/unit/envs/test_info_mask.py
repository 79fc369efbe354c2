"""Masks that Gymnasium environments give in their observations or in `info`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from dreamfleet.envs import SpaceError, make_env
from dreamfleet.envs.base import sample_action
from dreamfleet.envs.info_mask import MaskFromInfo
from dreamfleet.masks import ActionMask


class Picky(gymnasium.Env[Any, Any]):
    """Its info says what is allowed; a mask of several parts is a tuple, as Gymnasium has it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode: str | None = None, silent: bool = False) -> None:
        self.render_mode, self.silent, self.taken = render_mode, silent, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return np.zeros(2, np.float32), self.info()

    def step(self, action: Any) -> Any:
        assert tuple(action) in ((0, 1), (0, 2)), "a forbidden action was taken"
        self.taken += 1
        over = self.taken == 5
        return np.zeros(2, np.float32), 1.0, over, False, {} if over else self.info()

    def info(self) -> dict[str, Any]:
        mask = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
        return {} if self.silent else {"action_mask": mask}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


class Declared(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The mask as an observation, as a Box."""

    def __init__(self, env: Any, dtype: Any) -> None:
        super().__init__(env)
        mask = spaces.Box(0, 1, (5,), dtype)
        self.observation_space = spaces.Dict(place=env.observation_space, action_mask=mask)
        self._mask = np.array([1, 0, 0, 1, 1], dtype)

    def observation(self, observation: Any) -> Any:
        return {"place": observation, "action_mask": self._mask}


def played(env: Any, steps: int) -> list[Any]:
    mask = ActionMask.of(env.obs_space, env.act_space)
    assert mask is not None
    rng = np.random.default_rng(0)
    obs, seen = None, []
    for _ in range(steps):
        action = sample_action(env.act_space, rng)
        if obs is None or obs["is_last"]:
            action["reset"] = np.array(True)
        else:
            action[mask.name] = mask.sample(rng, obs["action_mask"])
        obs = env.step(action)
        seen.append(obs)
    return seen


def test_a_mask_in_info_becomes_an_observation() -> None:
    env = make_env(lambda: MaskFromInfo(Picky()))
    assert set(env.obs_space) >= {"vector", "action_mask"}
    seen = played(env, 20)
    assert [int(obs["action_mask"].sum()) for obs in seen[:7]] == [3, 3, 3, 3, 3, 0, 3]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float32])
def test_a_mask_may_be_a_box(dtype: Any) -> None:
    seen = played(make_env(lambda: Declared(Picky(), dtype)), 20)
    assert all(obs["action_mask"].sum() == 3 for obs in seen)


def test_taxi_has_a_mask_in_its_info() -> None:
    taxi = next(f"gym:{name}" for name in gymnasium.registry if name.startswith("Taxi-"))
    assert "action_mask" not in make_env(taxi).obs_space
    env = make_env(taxi, info_mask=True)
    assert env.notes == ["Actions are masked by the observation 'action_mask'."]
    seen = played(env, 50)
    assert any(not obs["action_mask"].all() for obs in seen)


def test_pixels_do_not_hide_the_mask() -> None:
    gymnasium.register("Picky-v0", Picky)
    try:
        env = make_env("gym:Picky-v0", info_mask=True, obs="pixels")
        assert set(env.obs_space) >= {"image", "action_mask"}
        assert "vector" not in env.obs_space
        played(env, 10)
    finally:
        del gymnasium.registry["Picky-v0"]


def test_what_cannot_be_masked_is_refused() -> None:
    with pytest.raises(SpaceError, match="discrete actions, and the action space is Box"):
        make_env("gym:Pendulum-v1", info_mask=True)
    with pytest.raises(SpaceError, match="hold 'action_mask' already"):
        MaskFromInfo(Declared(Picky(), np.int8))
    with pytest.raises(SpaceError, match="info holds no 'action_mask'"):
        played(make_env(lambda: MaskFromInfo(Picky(silent=True))), 3)
