"""The serial launcher: the whole fleet in one process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import (
    CountingAgent,
    Raising,
    dummy_with_its_id,
    left_behind,
    parts,
    small_run,
    stored_streams,
)
from masked_parts import Doors

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.envs import make_env
from dreamfleet.fleet.supervisor import FleetError
from dreamfleet.parallel import combined


def serial(logdir: Path, **changes: Any) -> tuple[Any, dict[str, Any]]:
    config = small_run(logdir, launcher="serial", **changes)
    return config, parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)


def saved_step(logdir: Path) -> int:
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
    return snapshot.step


def role_threads() -> list[str]:
    roles = ("agent", "env-", "replay", "logger", "parallel_")
    return [t.name for t in threading.enumerate() if t.name.startswith(roles)]


def test_a_serial_run_makes_no_process_goes_on_and_ends_like_any_other(tmp_path: Path) -> None:
    processes: list[str] = []
    for steps in (200, 500):
        config, fleet = serial(tmp_path, steps=steps, eval_envs=1)

        def make_agent() -> CountingAgent:
            processes.extend(left_behind())
            return CountingAgent()

        # A local function that holds this process's objects: nothing is packed and sent.
        combined(**{**fleet, "make_agent": make_agent}, args=config)
        assert steps <= saved_step(tmp_path) < steps + 200
        assert role_threads() == []
    assert processes == []
    found = stored_streams(tmp_path / "replay")
    assert sum(len(stream["action"]) for stream in found.values()) == saved_step(tmp_path)
    assert (tmp_path / "logs" / "serial.log").stat().st_size > 0


def test_a_run_whose_output_cannot_be_written_goes_on(tmp_path: Path) -> None:
    """It may be in a file on a disk that is full."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        raise OSError(errno.ENOSPC, "No space left on device")

    config, fleet = serial(tmp_path, steps=100, log_every=0.01)
    combined(**fleet, args=config, say=say)
    assert saved_step(tmp_path) >= 100
    assert len(lines) > 1


def test_a_failure_in_a_serial_run_is_the_error_itself(tmp_path: Path) -> None:
    config, fleet = serial(tmp_path, steps=0)
    with pytest.raises(FleetError, match="the pole is broken") as error:
        combined(**{**fleet, "make_env_train": Raising}, args=config)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert role_threads() == []


def test_ctrl_c_ends_a_serial_run_and_saves(tmp_path: Path) -> None:
    config, fleet = serial(tmp_path, steps=0, log_every=0.2)
    interrupted: list[str] = []

    def interrupt(line: str) -> None:
        if "score" in line and not interrupted:  # a second one would end it without saving
            interrupted.append(line)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        combined(**fleet, args=config, say=interrupt)
    assert saved_step(tmp_path) > 0
    assert role_threads() == []


def doors(envid: int) -> Any:
    return make_env(Doors, seed=envid)


def test_the_random_agent_takes_no_forbidden_action_in_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doors, "tried", [])
    config = small_run(tmp_path, launcher="serial", steps=300, eval_envs=1)
    agent = RandomAgent(doors(0).obs_space, doors(0).act_space)
    fleet = parts(config, make_agent=lambda: agent, make_env_train=doors, make_env_eval=doors)
    combined(**fleet, args=config)
    assert saved_step(tmp_path) >= 300
    assert agent.metrics() == {"policy/empty_masks": 0}
    assert Doors.tried == []
