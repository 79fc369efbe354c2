import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from dreamfleet import ConfigError, Space
from dreamfleet.envs import EnvError, SpaceError, make_env, noop
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
        (spaces.MultiBinary([2, 3]), Space(bool, (2, 3))),
        (spaces.Discrete(1, start=7), Space(np.int32, (), 0, 1)),
        (spaces.Box(0, 1, ()), Space(np.float32, (), 0, 1)),
        (spaces.Box(0, 3, (), np.int64), Space(np.int32, (), 0, 4)),
        (spaces.Box(3, 3, (2,)), Space(np.float32, (2,), 3, 3)),
        (spaces.Box(3, 3, (2,), np.int64), Space(np.int32, (2,), 0, 4)),
        (spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), Space(np.float32, (2,), -(2**63), 2**63)),
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
        (
            spaces.Box(0, 1, (2,), bool),
            Space(np.int32, (2,), 0, 2),
            np.array([0, 1], np.int32),
            np.array([False, True]),
        ),
        (spaces.Box(5, 5, (), np.int64), Space(np.int32, (), 0, 1), np.int32(0), np.array(5)),
        (spaces.Box(0, 4, ()), Space(np.float32, (), 0, 4), np.float32(3), np.float32(3)),
        (spaces.Discrete(1, start=7), Space(np.int32, (), 0, 1), np.int32(0), 7),
        (
            spaces.MultiDiscrete([[2], [3]], start=[[1], [2]]),
            Space(np.int32, (2, 1), 0, [[2], [3]]),
            np.array([[1], [0]], np.int32),
            np.array([[2], [2]]),
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


def test_tuples_are_numbered_and_put_together_again() -> None:
    obs = spaces.Tuple([BOX, spaces.Dict({"deep": spaces.Tuple([spaces.Discrete(3, start=5)])})])
    act = spaces.Tuple([spaces.Discrete(2, start=-1), spaces.Dict({"arm": spaces.Tuple([BOX])})])
    inner = Scripted(obs, act)
    env = make_env(lambda: inner)
    first = env.step(noop(env.act_space))
    assert first["0"].shape == (3,)
    assert first["1/deep/0"] in (0, 1, 2), "counted from 0"
    env.step({"0": np.int32(1), "1/arm/0": np.ones(3, np.float32), "reset": np.array(False)})
    assert act.contains(inner.actions[0])
    assert inner.actions[0][0] == 0
    card = make_env("gym:Blackjack-v1")
    assert {"0", "1", "2"} < card.step(noop(card.act_space)).keys()


def test_an_observation_without_numbers_is_left_out() -> None:
    env = GymEnv(Scripted(spaces.Dict({"x": BOX, "none": spaces.Box(0, 1, (0, 3))}), BOX))
    assert "none" not in env.step(noop(env.act_space))
    assert env.notes == ["Observation 'none' has shape (0, 3): it is left out."]


def _flattened(env: Any) -> Any:
    return gymnasium.wrappers.FlattenObservation(env)


@pytest.mark.parametrize(
    ("space", "advised"),
    [
        (spaces.Text(5), _flattened),
        (spaces.Dict({"say": spaces.Text(5), "x": BOX}), _flattened),
        (spaces.Tuple([spaces.Text(5), spaces.Discrete(3, start=2)]), _flattened),
        (spaces.OneOf([BOX, spaces.Discrete(3)]), _flattened),
        (
            spaces.Dict({"many": spaces.Sequence(BOX), "x": BOX}),
            lambda env: gymnasium.wrappers.FilterObservation(env, ["x"]),
        ),
        (
            spaces.Tuple([spaces.Sequence(BOX), BOX]),
            lambda env: gymnasium.wrappers.FilterObservation(env, [1]),
        ),
        (
            spaces.Sequence(BOX),
            lambda env: gymnasium.wrappers.TransformObservation(env, lambda many: BOX.low, BOX),
        ),
    ],
    ids=["text", "text in a dict", "text in a tuple", "one of", "dict", "tuple", "sequence"],
)
def test_the_advice_about_other_spaces_works(space: Any, advised: Any) -> None:
    inner = Scripted(space, spaces.Discrete(2))
    with pytest.raises(SpaceError, match="which no agent supports") as caught:
        make_env(lambda: inner)
    wrapped = advised(inner)
    assert f"gymnasium.wrappers.{type(wrapped).__name__}" in str(caught.value)
    env = make_env(lambda: wrapped)
    for _ in range(3):
        env.step({"action": np.int32(0), "reset": np.array(False)})


class Old:
    """As gym was before version 0.26."""

    observation_space = BOX
    action_space = spaces.Discrete(2)

    def reset(self) -> Any:
        return BOX.sample()

    def step(self, action: Any) -> Any:
        return BOX.sample(), 0.0, False, {}


class HalfOld(Old, gymnasium.Env):
    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return BOX.sample(), {}


class OtherHalfOld(Old):
    def reset(self, **options: Any) -> Any:
        return BOX.sample()


gymnasium.register("OldTest-v0", Old)
gymnasium.register("HalfOldTest-v0", HalfOld)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Old, "its reset takes no seed"),
        (HalfOld, "its step returns 4 values"),
        (OtherHalfOld, "its reset returns no pair of observation and info"),
        ("gym:OldTest-v0", "it does not inherit from gymnasium.Env"),
        ("gym:HalfOldTest-v0", "its step returns 4 values"),
    ],
)
def test_environments_of_the_old_gym_are_refused_with_the_way_out(task: Any, why: str) -> None:
    def play() -> None:
        env = make_env(task)
        for _ in range(2):
            env.step(noop(env.act_space, reset=False))

    with pytest.raises(EnvError, match=rf"old gym \({why}\): .*shimmy") as caught:
        play()
    assert "\n" not in str(caught.value)


def test_vector_and_multi_agent_environments_are_refused() -> None:
    for mode in ("sync", "vector_entry_point"):
        with pytest.raises(EnvError, match=r"is a vector environment.*makes envs=3 of them"):
            make_env(lambda: gymnasium.make_vec("CartPole-v1", 3, vectorization_mode=mode))  # noqa: B023

    class Several(Old):
        def observation_space(self, agent: str) -> Any: ...  # type: ignore[override]

    with pytest.raises(EnvError, match="Several is an environment of several agents"):
        make_env(Several)


def test_what_an_environment_lacks_is_one_sentence() -> None:
    def lacking() -> None:
        raise ModuleNotFoundError("No module named 'engine'")

    gymnasium.register("LackingTest-v0", lacking)
    with pytest.raises(MissingExtraError, match=r"gym:LackingTest-v0 cannot be made.*'engine'"):
        make_env("gym:LackingTest-v0")


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
        (spaces.Dict({"text": spaces.Text(5)}), BOX, "Observation 'text' is a Text space"),
        (BOX, spaces.Tuple([BOX, spaces.Text(4)]), "Action '1' is a Text space.*TransformAction"),
        (BOX, spaces.Box(0, 10**6, (2,), np.int64), "Action 'action' is a Box of more than 256"),
        (BOX, spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), "Action 'action' is a Box of more"),
        (BOX, spaces.Box(0, 2**64 - 1, (), np.uint64), "Action 'action' is a Box of more"),
        (BOX, spaces.Box(0, 1, (0,)), "Action 'action' has shape .0,.: leave it out"),
        (spaces.Box(0, 1, (0,)), BOX, "nothing to learn from"),
        (spaces.Dict({}), BOX, "empty Dict"),
        (spaces.Tuple([]), BOX, "empty Tuple"),
        (spaces.Dict({"a/b": BOX, "a": spaces.Dict({"b": BOX})}), BOX, "Two .* named 'a/b'"),
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


class Blind(Scripted):
    def __init__(self) -> None:
        super().__init__(BOX, BOX)


def test_an_environment_that_cannot_render_is_played_without_frames() -> None:
    gymnasium.register("BlindTest-v0", Blind)
    env = make_env("gym:BlindTest-v0", render=True)
    env.step(noop(env.act_space))
    assert env.render() is None
    with pytest.raises(ConfigError, match="gym:BlindTest-v0 has no option 'hats'"):
        make_env("gym:BlindTest-v0", hats=3)


def test_a_missing_package_for_rendering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = make_env("gym:CartPole-v1", render=True)
    env.step(noop(env.act_space))
    with pytest.raises(MissingExtraError, match=r"pip install .gymnasium\[classic-control\]"):
        env.render()


def test_options_reach_the_environment() -> None:
    env = make_env("gym:FrozenLake-v1", map_name="8x8", is_slippery=False)
    assert env.obs_space["vector"].classes == 64


class Told(Scripted):
    """Says what it is given as info."""

    def __init__(self, *infos: dict) -> None:
        super().__init__(BOX, spaces.Discrete(2))
        self._infos = iter(infos)

    def reset(self, **_: Any) -> tuple[Any, dict]:
        return self.observation_space.sample(), next(self._infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, next(self._infos)


def test_numbers_of_info_are_logged() -> None:
    """Those that say success, that are named so, or that are asked for; -inf is missing."""
    inner = Told(
        {"fuel": 1},
        {"success": True, "fuel": np.array([0.5]), "log/speed": 3, "log/name": "x", "other": 7},
        {"is_success": np.False_, "success": None, "fuel": np.nan, "log/speed": [1, 2]},
        {"fuel": 1e300, "log/speed": "fast"},
    )
    env = make_env(lambda: inner, log_info=("fuel", "log/speed"))
    first = env.step(noop(env.act_space))
    rest = [env.step(noop(env.act_space, reset=False)) for _ in range(3)]
    seen = {
        key: [float(obs[key]) for obs in (first, *rest)] for key in first if key.startswith("log/")
    }
    nothing = -np.inf
    assert seen == {
        "log/success": [nothing, 1, nothing, nothing],
        "log/is_success": [nothing, nothing, 0, nothing],
        "log/fuel": [1, 0.5, nothing, nothing],
        "log/speed": [nothing, 3, nothing, nothing],
    }
    assert env.unlogged == []


def test_names_in_info_that_ask_to_be_logged_are_found() -> None:
    env = make_env(lambda: Told({}, {"log/speed": 1, "other": 2, 3: 4, "log/text": "x"}))
    env.step(noop(env.act_space))
    assert env.unlogged == []
    env.step(noop(env.act_space, reset=False))
    assert env.unlogged == ["log/speed"]
    one = make_env(lambda: Told({}), log_info="fuel")
    assert "log/fuel" in one.obs_space


def test_info_is_an_option_of_gymnasium_environments() -> None:
    env = make_env("gym:CartPole-v1", log_info="angle")
    assert [key for key in env.obs_space if key.startswith("log/")] == ["log/angle"]
    with pytest.raises(ConfigError, match="bundled:catch has no option 'log_info'"):
        make_env("bundled:catch", log_info="angle")
    with pytest.raises(ConfigError, match=r"has no info: .* as keys that start with log/"):
        make_env(lambda: make_env("bundled:catch").env, log_info="angle")
