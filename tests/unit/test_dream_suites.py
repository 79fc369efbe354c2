"""Dreams beside the environments of every suite: names of actions, the same start, going back."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dreamfleet import Dream, Space
from dreamfleet.agents import RandomAgent
from dreamfleet.agents.api import Arrays, Guess
from dreamfleet.config import RunConfig
from dreamfleet.dream.session import FRESH, Session
from dreamfleet.envs import MissingExtraError, env_seed, make_env, noop, tasks
from dreamfleet.policy import Blueprint
from dreamfleet.replay import Replay
from dreamfleet.spaces import FLAGS, RESET, without_logs
from dreamfleet.view.dream_page import keys_of

STREAM, STEPS, OBSERVED = 1, 12, 6


class Forgetful:
    """A world model that decodes what it has observed last, and acts at random."""

    def __init__(self, spaces: Mapping[str, Space], actions: Mapping[str, Space]) -> None:
        self._keys, self._actions = list(spaces), actions

    def stored(self, step: Mapping[str, Any]) -> None:
        return None

    def observe(
        self, latent: Any, obs: Mapping[str, Any], action: Arrays, seed: int, number: int
    ) -> tuple[Any, Guess]:
        return self.imagine({key: obs[key] for key in self._keys}, action, seed, number)

    def imagine(self, latent: Any, action: Arrays, seed: int, number: int) -> tuple[Any, Guess]:
        rng = np.random.default_rng((seed, number))
        chosen = {key: np.asarray(space.sample(rng)) for key, space in self._actions.items()}
        return latent, Guess(latent, 0.0, 1.0, 0.0, chosen, chosen)


def played(logdir: Path, task: str, options: Mapping[str, Any]) -> Dream:
    """A dream of a run that has stored some steps of one environment."""
    config = RunConfig(task=task, logdir=logdir, env_options=dict(options), seed=3, agent="random")
    env = make_env(task, seed=env_seed(config.seed, STREAM), **options)
    agent = RandomAgent(env.obs_space, env.act_space)
    with Replay(1, 1000, logdir / "replay") as replay:
        obs = env.step(noop(env.act_space))
        for number in range(STEPS):
            rows = {key: np.asarray(value)[None] for key, value in without_logs(obs).items()}
            _, action, _ = agent.policy({}, rows)
            replay.add_batch({**rows, **action}, [STREAM], "actor", number)
            taken = {key: value[0] for key, value in action.items()}
            obs = env.step({**taken, RESET: obs["is_last"]})
    env.close()
    spaces = {key: space for key, space in agent.obs_space.items() if key not in FLAGS}
    return Dream(
        Forgetful(spaces, agent.act_space),
        spaces,
        agent.act_space,
        blueprint=Blueprint.of(agent, config),
        replay=[logdir / "replay"],
    )


def size_of(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


@pytest.mark.parametrize(
    ("task", "options", "size", "arrows"),
    [
        ("dmc:cartpole_balance", {"size": (16, 16)}, (16, 16), {}),
        ("atari:pong", {"size": (16, 16)}, (16, 16),
         {"ArrowUp": "up", "ArrowLeft": "left", "ArrowRight": "right", "ArrowDown": "down"}),
        ("atari100k:pong", {"size": (16, 16)}, (16, 16),
         {"ArrowLeft": "left", "ArrowRight": "right", "ArrowDown": "noop"}),
        ("crafter:reward", {"size": (18, 18), "area": (16, 16)}, (18, 18),
         {"ArrowUp": "move_up", "ArrowLeft": "move_left", "ArrowDown": "move_down"}),
        ("minigrid:DoorKey-5x5-v0", {"size": (16, 16)}, (16, 16),
         {"ArrowUp": "forward", "ArrowLeft": "left", "ArrowRight": "right"}),
        ("minigrid:DoorKey-5x5-v0", {"obs": "symbols"}, (80, 80), {"ArrowUp": "forward"}),
    ],
)  # fmt: skip
def test_a_dream_of_every_suite_is_played(
    task: str, options: dict[str, Any], size: tuple[int, int], arrows: dict[str, str], tmp_path
) -> None:
    try:
        tasks(task.partition(":")[0])
    except MissingExtraError as error:
        pytest.skip(str(error))
    session = Session(played(tmp_path, task, options))
    try:
        about = session.describe()
        assert about["starts"][0][0] == FRESH
        scene = session.start(0, OBSERVED, 0)
        # Crafter may or may not repeat itself; the recording is the truth if it does not.
        source = scene["truth"]["source"]
        assert source == "environment" or task.startswith("crafter:"), scene["note"]
        controls = about["controls"]
        names = scene["names"] if source == "environment" else session.start(FRESH, 1, 0)["names"]
        assert [len(names)] == [each["choices"] for each in controls]
        keys = keys_of(names, len(names))
        assert {arrow: names[keys[arrow]] for arrow in arrows} == arrows
        session.start(0, OBSERVED, 0)
        # The recorded actions lead the environment where they led it then.
        scene = session.step("recorded")
        assert size_of(scene["truth"]["frame"]) == size
        for _ in range(3):
            scene = session.step("policy")
        if not task.startswith("crafter:"):
            before = scene["truth"]
            session.go(1)
            assert session.go(4)["truth"] == before
        scene = session.start(FRESH, 1, 1)
        assert scene["truth"]["source"] == "environment"
        assert size_of(scene["truth"]["frame"]) == size
        assert session.step("you", [0.0] * len(controls))["truth"]["source"] == "environment"
    finally:
        session.close()
