from collections.abc import Callable

import numpy as np
import pytest

from dreamfleet import ConfigError
from dreamfleet.envs import make_env, noop
from dreamfleet.envs.bundled import Dummy


def scores(env, policy: Callable[[dict], dict], episodes: int) -> list[float]:
    result = []
    for _ in range(episodes):
        obs, score = env.step(noop(env.act_space)), 0.0
        while not obs["is_last"]:
            obs = env.step({**policy(obs), "reset": np.array(False)})
            score += float(obs["reward"])
        result.append(score)
    return result


def test_catch_is_won_by_looking() -> None:
    env = make_env("bundled:catch", balls=2, grid=8)

    def watch(obs: dict) -> dict:
        image = obs["image"].astype(int)
        ball = np.argwhere(image[..., 0] > 200)[:, 1].mean()
        paddle = np.argwhere((image[..., 2] > 200) & (image[..., 0] < 200))
        if not len(paddle):
            return {"action": np.int32(1)}
        return {"action": np.int32(1 + np.sign(int(ball // 8) - int(paddle[:, 1].mean() // 8)))}

    assert np.mean(scores(env, watch, 20)) == 2


def test_catch_is_lost_by_chance() -> None:
    env = make_env("bundled:catch")
    rng = np.random.default_rng(0)
    mean = np.mean(scores(env, lambda obs: {"action": rng.integers(3, dtype=np.int32)}, 400))
    assert -0.9 < mean < -0.3


def test_the_corridor_is_won_by_remembering() -> None:
    env = make_env("bundled:corridor", length=7)
    memory = {"side": 0}

    def remember(obs: dict) -> dict:
        if obs["is_first"]:
            memory["side"] = int(obs["signal"] > 0)
        return {"action": np.int32(memory["side"])}

    found = scores(env, remember, 200)
    assert set(found) == {1.0, 2.0}
    assert 1.4 < np.mean(found) < 1.6


def test_the_corridor_shows_nothing_at_the_turn() -> None:
    """What is seen when it counts is the same for both sides: no reaction to it can win."""
    env = make_env("bundled:corridor", length=5)
    last_seen, sides = [], set()
    for _ in range(40):
        obs = env.step(noop(env.act_space))
        sides.add(float(obs["signal"]))
        for _ in range(5):
            obs = env.step({"action": np.int32(0), "reset": np.array(False)})
        last_seen.append((float(obs["signal"]), float(obs["position"])))
    assert sides == {-1.0, 1.0}
    assert set(last_seen) == {(0.0, 1.0)}
    for side, mean in ((0, 0.0), (1, 0.5)):
        always = scores(env, lambda obs, side=side: {"action": np.int32(side)}, 400)
        assert set(always) == {-1.0, 1.0 + side}
        assert np.mean(always) == pytest.approx(mean, abs=0.25)


def test_the_point_mass_goes_where_it_is_pushed() -> None:
    env = make_env("bundled:pointmass")

    def steer(obs: dict) -> dict:
        return {"action": 8 * (obs["goal"] - obs["position"]) - 12 * obs["velocity"]}

    rng = np.random.default_rng(0)
    steered = np.mean(scores(env, steer, 10))
    drifting = np.mean(scores(env, lambda obs: {"action": rng.uniform(-1, 1, 2)}, 10))
    assert steered > 70
    assert drifting < 30


def test_the_dummy_identifies_every_step() -> None:
    env = make_env("bundled:dummy", seed=42, length=3)
    seen = []
    obs = env.step(noop(env.act_space))
    for _ in range(9):
        seen.append(obs["vector"][:3].tolist())
        obs = env.step({"action": np.int32(0), "reset": obs["is_last"]})
    assert seen == [[42, episode, step] for episode in range(3) for step in range(4)][:9]


def test_the_dummys_frames_are_read_only() -> None:
    obs = make_env("bundled:dummy").step({"action": np.int32(0), "reset": np.array(True)})
    with pytest.raises(ValueError, match="read-only"):
        obs["image"][0] = 0


def test_the_dummy_needs_room_for_its_origin() -> None:
    with pytest.raises(ConfigError, match="vector >= 3"):
        Dummy(vector=2)
