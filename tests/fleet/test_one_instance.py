"""An environment of which there is one, such as a robot, is never made twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet.factories import agent
from dreamfleet.roles.spaces_file import read_spaces

ROBOT = '''
import fcntl, os
from dreamfleet.envs.bundled import Catch


class Robot(Catch):
    """Holds an exclusive lock for its life, and refuses a second instance at once."""

    def __init__(self):
        super().__init__()
        print("the robot moves to its start")
        self._lock = os.open("robot.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self):
        os.close(self._lock)
        super().close()
'''


def test_a_robot_is_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "robot.py").write_text(ROBOT)
    command = [sys.executable, "-m", "dreamfleet.cli", "train", "--task", "robot:Robot", "--envs",
               "1", "--agent", "random", "--steps", "200", "--batch-size", "2", "--batch-length",
               "4", "--report-length", "4", "--eval-episodes", "2", "--eval-envs", "0",
               "--log-every", "1", "--max-restarts", "1", "--logdir", "run"]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("Training random on robot:Robot")
    assert "is started again" not in run.stdout
    assert "Evaluation: mean score" in run.stdout
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert "BlockingIOError" not in "".join(logs.values())
    assert "the robot moves" in logs["preflight.log"]
    assert "the robot moves" not in run.stdout + run.stderr

    # An agent that is started by hand takes the spaces from the run's directory.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = RunConfig(task="robot:Robot", agent="random", logdir=Path("run"))
    robot = make_env("robot:Robot")
    spaces = read_spaces(config, config.logdir)
    assert spaces == (robot.obs_space, robot.act_space)
    assert agent(config, spaces=spaces).obs_space == robot.obs_space
    with pytest.raises(BlockingIOError):
        agent(config)
    robot.close()
