import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from dreamfleet import Space
from dreamfleet.envs import SpaceError, make_env, noop
from dreamfleet.envs.gym import GymEnv
from dreamfleet.errors import MissingExtraError


class Scripted(gymnasium.Env):
    """Returns samples of its space, remembers actions, and ends as it is told."""

    def __init__(self, obs: Any, act: Any, end: tuple[bool, bool] = (False, False)) -> None:
        self.observation_space = obs
        self.action_space = act
        self.end = end
        self.resets: list[int | None] = []
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.resets.append(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.actions.append(action)
        return self.observation_space.sample(), 2.0, *self.end, {}


BOX = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(-2, 5, (3,)), Space(np.float32, (3,), -2, 5)),
        (spaces.Box(-2, 5, (3, 2), np.float64), Space(np.float32, (3, 2), -2, 5)),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), Space(np.uint8, (8, 8, 3))),
        (spaces.Box(0, 255, (4,), np.uint8), Space(np.int32, (4,), 0, 256)),
        (spaces.Box(0, 6, (4,), np.int64), Space(np.int32, (4,), 0, 7)),
        (spaces.Box(-5, 5, (4,), np.int64), Space(np.float32, (4,), -5, 5)),
        (spaces.Box(0, 10**9, (4,), np.int64), Space(np.float32, (4,), 0, 10**9)),
        (spaces.Discrete(4), Space(np.int32, (), 0, 4)),
        (spaces.Discrete(4, start=-2), Space(np.int32, (), 0, 4)),
        (spaces.MultiDiscrete([2, 3]), Space(np.int32, (2,), 0, [2, 3])),
        (spaces.MultiDiscrete([[2, 3]]), Space(np.int32, (1, 2), 0, [[2, 3]])),
        (spaces.MultiDiscrete([2, 3], start=[5, -1]), Space(np.int32, (2,), 0, [2, 3])),
        (spaces.MultiBinary(3), Space(bool, (3,))),
    ],
    ids=str,
)
def test_observation_spaces(space: Any, expected: Space) -> None:
    key = "image" if expected.dtype == np.uint8 else "vector"
    env = GymEnv(Scripted(space, BOX))
    assert env.obs_space[key] == expected
    space.seed(0)
    for _ in range(20):
        assert expected.contains(env.step({"action": np.zeros(3), "reset": False})[key])


@pytest.mark.parametrize(
    ("space", "expected", "given", "native"),
    [
        (BOX, Space(np.float32, (3,), -1, 1), np.zeros(3, np.float32), np.zeros(3, np.float32)),
        (spaces.Discrete(4), Space(np.int32, (), 0, 4), np.int32(3), 3),
        (spaces.Discrete(4, start=-2), Space(np.int32, (), 0, 4), np.int32(0), -2),
        (
            spaces.MultiDiscrete([2, 3], start=[5, -1]),
            Space(np.int32, (2,), 0, [2, 3]),
            np.array([1, 0], np.int32),
            np.array([6, -1]),
        ),
        (
            spaces.MultiBinary(3),
            Space(np.int32, (3,), 0, 2),
            np.array([0, 1, 1], np.int32),
            np.array([0, 1, 1], np.int8),
        ),
        (
            spaces.Box(-1, 2, (2,), np.int64),
            Space(np.int32, (2,), 0, 4),
            np.array([0, 3], np.int32),
            np.array([-1, 2]),
        ),
    ],
    ids=str,
)
def test_action_spaces(space: Any, expected: Space, given: Any, native: Any) -> None:
    inner = Scripted(BOX, space)
    env = GymEnv(inner)
    assert env.act_space["action"] == expected
    env.step(noop(env.act_space))
    env.step({"action": given, "reset": False})
    np.testing.assert_array_equal(inner.actions[0], native)
    assert space.contains(inner.actions[0]), "the environment would accept it"


def test_names_may_hold_slashes() -> None:
    inner = Scripted(spaces.Dict({"a/b": BOX, "c": spaces.Dict({"d/e": BOX})}),
                     spaces.Dict({"f/g": spaces.Discrete(3)}))  # fmt: skip
    env = GymEnv(inner)
    assert {"a/b", "c/d/e"} <= env.step({"f/g": 0, "reset": True}).keys()
    env.step({"f/g": 2, "reset": False})
    assert inner.actions == [{"f/g": 2}]


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "uint8"),
        (spaces.Box(0, 6, (4,), np.int64), "int32"),
        (spaces.Discrete(4), "int32"),
    ],
    ids=str,
)
def test_floats_where_integers_were_declared_are_refused(space: Any, dtype: str) -> None:
    """Cast silently, an image from 0 to 1 would be black."""
    inner = Scripted(space, BOX)
    env = make_env(lambda: inner)
    env.step(noop(env.act_space))
    inner.observation_space = spaces.Box(0, 1, space.shape, np.float32)
    with pytest.raises(SpaceError, match=f"has dtype float32, but its space says {dtype}: return"):
        env.step(noop(env.act_space))


def test_dicts_are_flattened_and_put_together_again() -> None:
    obs = spaces.Dict(
        {
            "eye": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "arm": spaces.Dict({"angle": BOX, "grip": spaces.Discrete(2)}),
        }
    )
    act = spaces.Dict(
        {
            "legs": spaces.Discrete(3, start=1),
            "arm": spaces.Dict({"push": BOX, "grip": spaces.MultiBinary(2)}),
        }
    )
    inner = Scripted(obs, act)
    env = GymEnv(inner)
    assert {"eye", "arm/angle", "arm/grip"} < env.obs_space.keys()
    assert env.act_space.keys() == {"legs", "arm/push", "arm/grip", "reset"}
    first = env.step(noop(env.act_space))
    assert first["eye"].shape == (4, 4, 3)
    assert first["arm/grip"].dtype == np.int32
    env.step({"legs": 2, "arm/push": np.ones(3), "arm/grip": np.array([1, 0]), "reset": False})
    assert act.contains(inner.actions[0])
    assert inner.actions[0]["legs"] == 3


@pytest.mark.parametrize(
    ("end", "last", "terminal"),
    [
        ((False, False), False, False),
        ((True, False), True, True),
        ((False, True), True, False),
        ((True, True), True, True),
    ],
)
def test_terminated_is_terminal_and_truncated_is_not(
    end: tuple, last: bool, terminal: bool
) -> None:
    env = GymEnv(Scripted(BOX, spaces.Discrete(2), end))
    env.step(noop(env.act_space))
    obs = env.step({"action": np.int32(0), "reset": False})
    assert (bool(obs["is_last"]), bool(obs["is_terminal"])) == (last, terminal)
    assert obs["reward"] == 2


def test_cartpole_that_falls_is_terminal_and_that_stands_is_not() -> None:
    env = make_env("gym:CartPole-v1")
    obs = env.step(noop(env.act_space))
    while not obs["is_last"]:
        obs = env.step({"action": np.int32(1), "reset": np.array(False)})
    assert obs["is_terminal"]
    obs, steps = env.step(noop(env.act_space)), 0
    while not obs["is_last"]:
        _, _, angle, speed = obs["vector"]
        lean = angle + 0.3 * speed + 0.03 * obs["vector"][0] + 0.06 * obs["vector"][1]
        obs = env.step({"action": np.int32(lean > 0), "reset": np.array(False)})
        steps += 1
    assert steps == 500
    assert not obs["is_terminal"]


def test_only_the_first_episode_is_seeded() -> None:
    inner = Scripted(BOX, spaces.Discrete(2))
    env = GymEnv(inner, seed=9)
    for _ in range(3):
        env.step(noop(env.act_space))
    assert inner.resets == [9, None, None]


@pytest.mark.parametrize(
    ("obs", "act", "words"),
    [
        (spaces.Tuple([BOX, BOX]), BOX, "Observation 'vector' is a Tuple space"),
        (spaces.Dict({"text": spaces.Text(5)}), BOX, "Observation 'text' is a Text space"),
        (BOX, spaces.Tuple([BOX]), "Action 'action' is a Tuple space"),
        (BOX, spaces.Box(0, 10**6, (2,), np.int64), "Action 'action'"),
        (spaces.Dict({}), BOX, "empty Dict"),
        (spaces.Dict({"reward": BOX}), BOX, "'reward'.*rename"),
    ],
)
def test_unsupported_spaces_are_refused(obs: Any, act: Any, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        GymEnv(Scripted(obs, act))


def test_frames_instead_of_or_with_the_state() -> None:
    pixels = make_env("gym:CartPole-v1", obs="pixels", size=(48, 64))
    both = make_env("gym:CartPole-v1", obs="both", seed=3)
    assert "vector" not in pixels.obs_space
    assert pixels.step(noop(pixels.act_space))["image"].shape == (48, 64, 3)
    obs = both.step(noop(both.act_space))
    assert obs["image"].shape == (400, 600, 3)
    state = make_env("gym:CartPole-v1", seed=3)
    np.testing.assert_array_equal(obs["vector"], state.step(noop(state.act_space))["vector"])
    before = obs["image"]
    for _ in range(5):
        obs = both.step({"action": np.int32(1), "reset": np.array(False)})
    assert (obs["image"] != before).any(), "it moves"


def test_rendering_is_an_option() -> None:
    env = make_env("gym:CartPole-v1")
    env.step(noop(env.act_space))
    assert env.render() is None
    env = make_env("gym:CartPole-v1", render=True)
    env.step(noop(env.act_space))
    assert env.render().shape == (400, 600, 3)
    with pytest.raises(SpaceError, match="renders no frames"):
        GymEnv(gymnasium.make("CartPole-v1"), obs="pixels")


def test_a_missing_package_for_rendering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = make_env("gym:CartPole-v1", render=True)
    env.step(noop(env.act_space))
    with pytest.raises(MissingExtraError, match=r"pip install .gymnasium\[classic-control\]"):
        env.render()


def test_options_reach_the_environment() -> None:
    env = make_env("gym:FrozenLake-v1", map_name="8x8", is_slippery=False)
    assert env.obs_space["vector"].classes == 64
