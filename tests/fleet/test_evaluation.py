"""Evaluations: in processes of their own, bounded, and without losing what was played."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import left_behind

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.cli import main
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.envs.wrappers import TimeLimit
from dreamfleet.evaluation import EvaluationError, evaluate
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy

ENVS = """
import os
from pathlib import Path

import gymnasium
import numpy as np

FOLDER = Path(__file__).parent


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        with (FOLDER / "made").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        print("a line of the environment", flush=True)
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Once(Endless):
    "Raises in the middle of its second episode, once."

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        if (FOLDER / "second").exists() and not (FOLDER / "raised").exists():
            (FOLDER / "raised").touch()
            raise RuntimeError("the pole is broken")
        if self.steps == 3:
            (FOLDER / "second").touch()
        return obs, reward, self.steps == 3, False, info


class Broken(Endless):
    def step(self, action):
        raise RuntimeError("the pole is broken")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"envs_{tmp_path.name}.py").write_text(ENVS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def trained(folder: Path, name: str, **settings: Any) -> Path:
    """The directory of a run that has saved its agent."""
    task = f"envs_{folder.name}:{name}"
    config = RunConfig(task=task, agent="random", **settings)
    env = make_env(task)
    agent = RandomAgent(env.obs_space, env.act_space)
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    Checkpoint(folder / "run" / "ckpt" / "agent").save(parts, step=7)
    (folder / "made").unlink()
    return folder / "run"


def test_one_environment_in_a_process_with_its_output_in_the_logs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its episodes never end, it writes a line a step, and there is but one of it."""
    run = trained(folder, "Endless", envs_per_process=8)
    command = ["eval", str(run), "--episodes", "3", "--envs", "1", "--max-steps", "20"]
    assert main(command) == 0
    said = capfd.readouterr()
    assert "returns        20  20  20" in said.out
    assert "3 of 3 episodes did not end within 20 steps" in said.out
    assert "a line of the environment" not in said.out + said.err
    assert (run / "logs" / "eval-0.log").read_text().count("a line of the environment") == 60
    (pid,) = (folder / "made").read_text().splitlines()
    assert int(pid) != os.getpid()
    assert left_behind() == []


def test_an_environment_that_fails_costs_its_episode(folder: Path) -> None:
    run = trained(folder, "Once", launcher="serial")
    lines: list[str] = []
    result = evaluate(run, 4, envs=1, say=lines.append)
    assert result.returns == [3.0, 3.0, 3.0]
    assert result.notes() == ["1 of 4 episodes failed: RuntimeError: the pole is broken"]
    assert (result.failed, result.cut_short) == (1, 0)
    assert len((folder / "made").read_text().splitlines()) == 2
    assert "4 episodes in 1 environment" in lines[0]


def test_when_all_fail_the_traceback_of_the_environment_is_shown(folder: Path) -> None:
    run = trained(folder, "Broken", launcher="serial", envs_per_process=2)
    with pytest.raises(EvaluationError, match="All 3 episodes failed") as caught:
        evaluate(run, 3, envs=2)
    assert f"envs_{folder.name}.py" in str(caught.value)
    assert str(caught.value).endswith("RuntimeError: the pole is broken")


def test_a_policy_in_memory_plays_in_an_environment_of_ones_own(folder: Path) -> None:
    policy = Policy.load(trained(folder, "Endless", launcher="serial", eval_max_steps=5))
    assert evaluate(policy, 2).lengths == [5, 5]

    def factory(seed: int) -> Any:
        return TimeLimit(make_env(f"envs_{folder.name}:Endless", seed=seed), 2)

    result = evaluate(policy, 4, envs=4, env=factory)
    assert result.lengths == [2, 2, 2, 2]
