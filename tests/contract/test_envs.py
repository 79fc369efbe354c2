"""Every environment keeps the contract of `dreamfleet.envs.base`, whatever suite it is from."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from dreamfleet.envs import Env, MissingExtraError, make_env, noop, sample_action

STEPS = 150

# Task, options. Rendering environments are slow here, so they are few.
TASKS = [
    ("bundled:catch", {}),
    ("bundled:catch", {"balls": 3, "grid": 5, "size": (40, 32)}),
    ("bundled:corridor", {}),
    ("bundled:pointmass", {"length": 20}),
    ("bundled:dummy", {"length": 20}),
    ("bundled:dummy", {"length": 7, "actions": "both", "terminal": True}),
    ("bundled:dummy", {"length": 40, "actions": "continuous", "repeat": 3, "size": (32, 48)}),
    ("gym:CartPole-v1", {}),
    ("gym:CartPole-v1", {"obs": "both", "size": (64, 64), "time_limit": 10}),
    ("gym:Pendulum-v1", {"time_limit": 40}),
    ("gym:MountainCarContinuous-v0", {"repeat": 4, "time_limit": 30}),
    ("gym:FrozenLake-v1", {"time_limit": 30}),
    ("dmc:cartpole_balance", {"time_limit": 50}),
    ("dmc:walker_walk", {"repeat": 2, "time_limit": 30}),
    ("dmc:ball_in_cup_catch", {"time_limit": 50}),
    ("atari:pong", {"time_limit": 40}),
    ("atari100k:breakout", {"time_limit": 40}),
    ("crafter:reward", {"length": 60, "area": (16, 16)}),
    ("minigrid:DoorKey-5x5-v0", {"time_limit": 30}),
    ("minigrid:GoToDoor-5x5-v0", {"obs": "symbols"}),
]
IDS = [f"{task} {' '.join(f'{k}={v}' for k, v in options.items())}" for task, options in TASKS]


@pytest.fixture(params=TASKS, ids=IDS)
def task(request: pytest.FixtureRequest) -> tuple[str, dict]:
    return request.param


@pytest.fixture
def env(task: tuple[str, dict]) -> Iterator[Env]:
    env = build(task, seed=7)
    yield env
    env.close()


def build(task: tuple[str, dict], seed: int) -> Env:
    name, options = task
    try:
        return make_env(name, seed=seed, **options)
    except MissingExtraError as error:
        pytest.skip(str(error))


def play(env: Env, steps: int = STEPS, seed: int = 0) -> list[dict]:
    """A copy of each observation, and at the end none of them has been overwritten: they are sent
    asynchronously."""
    rng = np.random.default_rng(seed)
    kept, copies, action = [], [], noop(env.act_space)
    for _ in range(steps + 1):
        kept.append(env.step(action))
        copies.append({key: value.copy() for key, value in kept[-1].items()})
        action = {**sample_action(env.act_space, rng), "reset": copies[-1]["is_last"]}
    assert_equal(kept, copies)
    return copies


def assert_equal(left: list[dict], right: list[dict]) -> None:
    for one, two in zip(left, right, strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def test_spaces_are_what_an_agent_takes(env: Env) -> None:
    assert {"reward", "is_first", "is_last", "is_terminal"} <= env.obs_space.keys()
    assert len(env.act_space) > 1
    assert env.act_space["reset"].dtype == bool
    for key, space in env.obs_space.items():
        assert space.dtype in (np.uint8, np.int32, np.float32, bool), key
        assert len(space.shape) <= 2 or (space.dtype == np.uint8 and len(space.shape) == 3), key
    for key, space in env.act_space.items():
        if space.discrete:
            assert (space.low == 0).all(), key
        else:
            assert (space.low == -1).all(), key
            assert (space.high == 1).all(), key


def test_observations_lie_in_their_spaces_and_flags_are_consistent(env: Env) -> None:
    trajectory = play(env)
    for obs in trajectory:
        assert obs.keys() == env.obs_space.keys()
        for key, space in env.obs_space.items():
            assert isinstance(obs[key], np.ndarray), key
            assert space.contains(obs[key]), (key, obs[key], space)
        assert obs["is_last"] or not obs["is_terminal"], "terminal without last"
        if obs["is_first"]:
            assert obs["reward"] == 0
            assert not obs["is_last"]
    assert trajectory[0]["is_first"]
    assert any(obs["is_last"] for obs in trajectory), "no episode ended: give it a time limit"
    for before, after in itertools.pairwise(trajectory):
        assert after["is_first"] == before["is_last"], "first exactly after last"
    # A reset may come at any time, and closing twice is fine.
    obs = env.step(noop(env.act_space))
    assert obs["is_first"]
    assert obs["reward"] == 0
    env.close()


def test_a_missing_reset_starts_an_episode_anyway(env: Env) -> None:
    rng = np.random.default_rng(0)
    obs = env.step(sample_action(env.act_space, rng))
    assert obs["is_first"]
    for _ in range(STEPS):
        last = obs["is_last"]
        obs = env.step(sample_action(env.act_space, rng))
        assert obs["is_first"] == last


# Where no chance decides about anything that can be seen within the first steps.
ALIKE = ("atari100k",)


def test_a_seed_decides_everything(task: tuple[str, dict]) -> None:
    runs = []
    for seed in (11, 11, 2):
        env = build(task, seed)
        runs.append(play(env))
        env.close()
    assert_equal(*runs[:2])
    different = any(
        not np.array_equal(one[key], two[key])
        for one, two in zip(*runs[1:], strict=True)
        for key in one
    )
    assert different or task[0].startswith(ALIKE)


CONTINUOUS = [
    (task, options)
    for task, options in TASKS
    if task.startswith(("bundled:pointmass", "gym:Pendulum", "gym:MountainCar", "dmc:"))
    or options.get("actions") in ("both", "continuous")
]


@pytest.mark.parametrize("task", CONTINUOUS, ids=str)
def test_actions_out_of_bounds_are_clipped(env: Env) -> None:
    continuous = [key for key, space in env.act_space.items() if not space.discrete]
    assert continuous
    env.step(noop(env.act_space))
    rng = np.random.default_rng(0)
    for _ in range(5):
        action = sample_action(env.act_space, rng)
        action |= {key: action[key] * 50 for key in continuous}
        env.step(action)


# The others render with an option only.
RENDERED = [
    (task, options)
    for task, options in TASKS
    if not task.startswith(("gym:", "dmc:")) or "size" in options
]


@pytest.mark.parametrize("task", RENDERED, ids=str)
def test_frames_are_images(env: Env) -> None:
    env.step(noop(env.act_space))
    frame = env.render()
    assert frame.dtype == np.uint8
    assert frame.ndim == 3
