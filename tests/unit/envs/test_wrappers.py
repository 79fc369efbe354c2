from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from masked_parts import Doors

from dreamfleet import ConfigError, Space
from dreamfleet.envs import EpisodicEnv, Outcome, SpaceError, make_env, noop
from dreamfleet.envs.base import Arrays
from dreamfleet.envs.wrappers import (
    ActionRepeat,
    AgentEnv,
    TimeLimit,
    Wrapper,
    check_declaration,
)


class Recorder(EpisodicEnv):
    """Ends after `length` actions, rewards their number, and keeps the actions it was given."""

    def __init__(
        self, act_space: dict[str, Space] | None = None, length: int = 10, **obs: Any
    ) -> None:
        self.obs = {key: np.asarray(value) for key, value in obs.items()}
        obs_space = {key: Space(value.dtype, value.shape) for key, value in self.obs.items()}
        super().__init__(obs_space, act_space or {"action": Space(np.int32, (), 0, 3)})
        self.length = length
        self.taken = 0
        self.actions: list[Mapping[str, Any]] = []

    def _begin(self) -> Arrays:
        self.taken = 0
        return dict(self.obs)

    def _advance(self, action: Mapping[str, Any]) -> Outcome:
        self.taken += 1
        self.actions.append(action)
        over = self.taken >= self.length
        return Outcome(dict(self.obs), self.taken, over, over)


def act(env: Any, **action: Any) -> Arrays:
    return env.step({"action": 0, **action, "reset": np.array(False)})


def begin(env: Any) -> Arrays:
    return env.step(noop(env.act_space))


def test_finite_bounds_map_to_the_unit_interval() -> None:
    inner = Recorder({"action": Space(np.float64, (2,), [0, -10], [4, 30])})
    env = AgentEnv(inner)
    assert env.act_space["action"] == Space(np.float32, (2,), -1, 1)
    begin(env)
    for given, native in [
        ([-1, -1], [0, -10]),
        ([1, 1], [4, 30]),
        ([0, 0], [2, 10]),
        ([0.5, -0.5], [3, 0]),
        ([7, -7], [4, -10]),  # clipped first
    ]:
        act(env, action=np.array(given, np.float32))
        assert inner.actions[-1]["action"].tolist() == native
        assert inner.actions[-1]["action"].dtype == np.float64


INF, MAX = np.inf, np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("low", "high", "bounds", "natives", "note"),
    [
        (-INF, INF, None, (-1, 1), "has no bounds: the agent acts within -1 to 1; the option"),
        (-MAX, MAX, None, (-1, 1), "has no bounds: the agent acts within -1 to 1; the option"),
        (0, INF, None, (0, 1), "has a bound missing: the agent acts within 0 to 1;"),
        (5, INF, None, (5, 6), "within 5 to 6"),
        (-INF, -3, None, (-4, -3), "within -4 to -3"),
        (-2, 2, None, (-2, 2), ""),
        (3, 3, None, (3, 3), ""),
        (-INF, INF, (-7, 9), (-7, 9), ""),
        (0, INF, (-7, 9), (0, 9), ""),
        (-INF, INF, {"action": (-7, 9)}, (-7, 9), ""),
    ],
)
def test_missing_bounds_of_actions_are_said_and_set(
    low: float, high: float, bounds: Any, natives: tuple, note: str
) -> None:
    inner = Recorder({"action": Space(np.float32, (2,), low, high)})
    env = AgentEnv(inner, action_bounds=bounds)
    assert env.act_space["action"] == Space(np.float32, (2,), -1, 1)
    begin(env)
    for given, native in zip((-1, 1), natives, strict=True):
        act(env, action=np.full(2, given, np.float32))
        assert inner.actions[-1]["action"].tolist() == [native] * 2
    assert len(env.notes) == bool(note)
    assert note in "".join(env.notes)


def test_some_missing_bounds_are_counted() -> None:
    space = Space(np.float32, (3,), [-INF, 0, -2], [INF, INF, 2])
    inner = Recorder({"push": space, "action": Space(np.int32, (), 0, 3)})
    env = make_env(lambda: inner, time_limit=5)
    begin(env)
    act(env, push=np.array([5, -0.5, 0.5], np.float32))
    assert inner.actions[-1]["push"].tolist() == [1, 0.25, 1]
    assert env.notes == [
        "Action 'push' has a bound missing in 2 of 3 dimensions: the agent acts within -1 to 1, "
        "0 to 1; the option action_bounds=[low,high] sets others."
    ]
    assert make_env(lambda: inner, action_bounds={"push": [-3, 3]}).notes == []


@pytest.mark.parametrize(
    ("low", "bounds", "words"),
    [
        (-1, (-2, 2), "without bounds, and there are none here: leave it out"),
        (-INF, {"pull": (-2, 2)}, "action 'pull' is not one of them"),
        (-INF, {"reset": (-2, 2)}, "action 'reset' is not one of them"),
        (-INF, (2, -2), r"action_bounds=\[2, -2\] leaves nothing of action 'push'"),
        (-INF, (float("nan"), 1), "leaves nothing"),
        (-INF, (7, 9), "leaves nothing"),
        (-INF, 3, "action_bounds=3 is not valid: use 2 values, each entry a number"),
        (-INF, {"push": "far"}, "is not valid"),
    ],
)
def test_wrong_bounds_of_actions_are_refused(low: float, bounds: Any, words: str) -> None:
    inner = Recorder({"push": Space(np.float32, (3,), low, 1)})
    with pytest.raises(ConfigError, match=words):
        make_env(lambda: inner, action_bounds=bounds)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_actions_have_the_dtype_of_their_space(dtype: type) -> None:
    inner = Recorder({"action": Space(dtype, (2,), -3, 3)})
    env = AgentEnv(inner)
    begin(env)
    act(env, action=np.ones(2, np.float32))
    assert inner.actions[-1]["action"].dtype == dtype


def test_discrete_actions_pass_through_untouched() -> None:
    inner = Recorder()
    env = AgentEnv(inner)
    begin(env)
    act(env, action=2)
    assert inner.actions[-1]["action"] == 2
    assert env.act_space == inner.act_space


def test_dtypes_are_unified_and_actions_cast_back() -> None:
    inner = Recorder(
        {"action": Space(np.int64, (), 0, 3)},
        real=np.zeros(2, np.float64),
        half=np.float16(1),
        whole=np.zeros(3, np.int64),
        flag=np.zeros(2, bool),
        image=np.zeros((4, 4, 3), np.uint8),
    )
    env = AgentEnv(inner)
    begin(env)
    obs = act(env, action=np.int32(2))
    expected = {
        "real": "float32",
        "half": "float32",
        "whole": "int32",
        "flag": "bool",
        "image": "uint8",
    }
    for key, dtype in expected.items():
        assert env.obs_space[key].dtype == dtype
        assert obs[key].dtype == dtype
    assert inner.actions[-1]["action"].dtype == np.int64
    assert env.act_space["action"].dtype == np.int32


def test_floats_where_integers_were_declared_are_refused() -> None:
    class Wrong(EpisodicEnv):
        def __init__(self) -> None:
            image = {"image": Space(np.uint8, (4, 4, 3))}
            super().__init__(image, {"action": Space(np.int32, (), 0, 2)})

        def _begin(self) -> dict:
            return {"image": np.full((4, 4, 3), 0.5)}

        def _advance(self, action: Any) -> Any:
            raise NotImplementedError

    for size in (None, (8, 8)):  # resizing must not hide it either
        env = make_env(Wrong, size=size)
        with pytest.raises(SpaceError, match="'image' has dtype float64, but its space says uint8"):
            env.step(noop(env.act_space))


def test_a_value_on_its_bound_stays_inside_when_rounded() -> None:
    """4.8 is above the largest float32 below 4.8: cast alone, the bound would exclude it."""
    env = Recorder(x=np.array(0.0))
    env.obs_space["x"] = Space(np.float64, (), -4.8, 4.8)
    unified = AgentEnv(env)
    assert unified.obs_space["x"].contains(np.array(4.8, np.float32))


def test_a_time_limit_is_last_but_not_terminal() -> None:
    inner = Recorder(length=5)
    env = TimeLimit(inner, 3)
    for _ in range(2):
        assert not begin(env)["is_last"]
        flags = [(bool(o["is_last"]), bool(o["is_terminal"])) for o in (act(env) for _ in range(3))]
        assert flags == [(False, False), (False, False), (True, False)]
        assert act(env)["is_first"], "the episode is over although the environment's is not"


def test_a_time_limit_keeps_an_earlier_end() -> None:
    env = TimeLimit(Recorder(length=2), 3)
    begin(env)
    act(env)
    assert act(env)["is_terminal"]


def test_repeated_actions_sum_their_rewards() -> None:
    inner = Recorder(length=5)
    env = ActionRepeat(inner, 3)
    assert begin(env)["reward"] == 0
    assert inner.taken == 0, "the reset is not repeated"
    obs = act(env, action=1)
    assert (obs["reward"], inner.taken) == (1 + 2 + 3, 3)
    obs = act(env, action=2)
    assert (obs["reward"], inner.taken) == (4 + 5, 5), "stops at the end of the episode"
    assert obs["is_terminal"]
    assert [a["action"] for a in inner.actions] == [1, 1, 1, 2, 2]
    assert obs["reward"].dtype == np.float32


def test_images_are_resized_and_nothing_else() -> None:
    inner = Recorder(image=np.full((8, 6, 3), 7, np.uint8), vector=np.zeros(3, np.float32))
    env = AgentEnv(inner, (4, 5))
    assert env.obs_space["image"] == Space(np.uint8, (4, 5, 3))
    obs = begin(env)
    assert obs["image"].shape == (4, 5, 3)
    assert (obs["image"] == 7).all()
    assert obs["vector"].shape == (3,)


class Wrong(Recorder):
    """Returns something else than it declares."""

    def __init__(self, **change: Any) -> None:
        super().__init__(x=np.zeros(2, np.float32), n=np.int32(0))
        self.obs_space["n"] = Space(np.int32, (), 0, 5)
        self.change = change

    def step(self, action: Mapping[str, Any]) -> Arrays:
        obs = {**super().step(action), **self.change}
        return {key: value for key, value in obs.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, r"lacks 'x'.*return it on every step"),
        ({"y": np.zeros(1)}, r"holds 'y'.*add it to obs_space"),
        ({"x": np.zeros(3, np.float32)}, r"'x' has shape \(3,\), but the space says \(2,\)"),
        ({"n": np.zeros(())}, r"'n' has dtype float64, but its space says int32"),
        ({"x": np.array([0, np.nan], np.float32)}, r"'x' holds NaN"),
        ({"x": np.array([0, np.inf], np.float32)}, r"'x' holds NaN or infinity"),
        ({"reward": np.array(np.nan, np.float32)}, r"'reward' holds NaN"),
        ({"n": np.array(5, np.int32)}, r"'n' runs from 5 to 5.*widen"),
    ],
)
def test_a_wrong_observation_is_named(change: dict, words: str) -> None:
    env = AgentEnv(Wrong(**change))
    with pytest.raises(SpaceError, match=words):
        begin(env)


def test_huge_values_are_numbers() -> None:
    begin(AgentEnv(Wrong(x=np.full(2, -3e38, np.float32))))


def test_minus_infinity_marks_a_missing_value() -> None:
    begin(AgentEnv(Wrong(x=np.full(2, -np.inf, np.float32))))


def test_bounds_are_only_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamfleet.envs.wrappers._BOUNDS_CHECKED", 2)
    inner = Wrong()
    env = AgentEnv(inner)
    begin(env)
    act(env)
    inner.change = {"n": np.array(9, np.int32)}
    act(env)
    inner.change = {"x": np.full(2, np.nan, np.float32)}
    with pytest.raises(SpaceError, match="NaN"):
        act(env)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"reset": False}, "lacks 'action'"),
        ({"action": np.zeros((1,), np.int32), "reset": False}, "without a batch axis"),
        ({"action": np.int32(3), "reset": False}, "from 0 to 2"),
    ],
)
def test_a_wrong_action_is_named(action: dict, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        AgentEnv(Recorder()).step(action)


@pytest.mark.parametrize(
    ("obs", "act", "words"),
    [
        ({"reward": None}, {}, "lacks 'reward'"),
        ({"is_first": Space(np.int32)}, {}, "scalar of dtype bool"),
        ({}, {"reset": None}, "'reset' with"),
        ({}, {"action": None}, "at least one action"),
    ],
)
def test_impossible_declarations_are_refused(obs: dict, act: dict, words: str) -> None:
    env = Recorder()
    obs_space = {k: v for k, v in {**env.obs_space, **obs}.items() if v is not None}
    act_space = {k: v for k, v in {**env.act_space, **act}.items() if v is not None}
    with pytest.raises(SpaceError, match=words):
        check_declaration(obs_space, act_space)


def test_log_keys_may_have_any_shape() -> None:
    env = Recorder()
    check_declaration({**env.obs_space, "log/map": Space(np.float32, (2, 8, 8))}, env.act_space)


@pytest.mark.parametrize(("role", "key"), [("obs", "reward"), ("act", "reset")])
def test_reserved_keys_belong_to_the_contract(role: str, key: str) -> None:
    class Clash(Recorder):
        def __init__(self) -> None:
            obs = {key: Space(np.float32)} if role == "obs" else {}
            act = {key: Space(bool)} if role == "act" else {"a": Space(bool)}
            EpisodicEnv.__init__(self, obs, act)

    with pytest.raises(SpaceError, match=f"'{key}'.*rename"):
        Clash()


def test_an_action_is_not_repeated_where_the_mask_forbids_it() -> None:
    env = ActionRepeat(Doors(), 50)
    for _ in range(3):
        obs = env.step({"door": 0, "reset": True})
        steps = 0
        while not obs["is_last"]:
            obs = env.step({"door": int(obs["action_mask"].argmax()), "reset": False})
            steps += 1
        assert steps > 1, "doors close now and then"


def test_a_mask_is_named_in_the_notes() -> None:
    assert make_env(Doors).notes == ["Actions are masked by the observation 'action_mask'."]
    assert make_env("bundled:dummy").notes == []


def test_a_wrapper_of_ones_own_may_override_its_spaces() -> None:
    class Renamed(Wrapper):
        @property
        def obs_space(self) -> Any:
            return {**super().obs_space, "more": Space(np.float32)}

    assert Renamed(Recorder()).obs_space.keys() == {*Recorder().obs_space, "more"}
