"""Environments and replay that somebody else starts."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from fleet_parts import (
    CountingAgent,
    Together,
    left_behind,
    parts,
    small_run,
    stored_streams,
)

from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import LocalLauncher
from dreamfleet.parallel import combined, parallel_envs, parallel_replay


def test_a_run_works_with_environments_and_replay_started_elsewhere(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fleet-") as sockets:
        config = small_run(
            tmp_path,
            steps=300,
            remote_envs=True,
            remote_replay=True,
            **{f"{role}_addr": f"ipc://{sockets}/{role}" for role in ("actor", "replay", "logger")},
        )
        make_env = partial(Together, tmp_path, config.envs)
        fleet = parts(config, make_agent=CountingAgent, make_env_train=make_env)
        replay = partial(
            parallel_replay,
            fleet["make_replay_train"],
            fleet["make_replay_eval"],
            fleet["make_stream"],
            config,
        )
        envs = partial(parallel_envs, fleet["make_env_train"], fleet["make_env_eval"], config)
        others = [Worker("envs", "env", envs), Worker("replay", "replay", replay)]
        with LocalLauncher(tmp_path / "elsewhere") as launcher:
            launcher.prepare(others)
            running = [launcher.start(worker) for worker in others]
            try:
                combined(**fleet, args=config)
            finally:
                for process in running:
                    process.terminate()
                    assert process.wait(60) is not None
    assert left_behind() == []
    found = stored_streams(tmp_path / "replay")
    assert sorted(found) == [0, 1, 2, 3]
    assert sum(len(stream["action"]) for stream in found.values()) >= 300


def test_a_run_whose_replay_never_comes_says_so_and_can_be_ended(tmp_path: Path) -> None:
    class Understood(Exception):
        pass

    def read(line: str) -> None:
        waits = "the learner is waiting for the replay" in line
        if waits and "the replay has not reported" in line:
            raise Understood

    with tempfile.TemporaryDirectory(prefix="fleet-") as sockets:
        config = small_run(tmp_path, remote_replay=True, replay_addr=f"ipc://{sockets}/replay")
        with pytest.raises(Understood):
            combined(**parts(config, make_agent=CountingAgent), args=config, say=read)
    # The agent has ended by itself, and was not left to be killed.
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert "stopped before its first update" in log
    assert left_behind() == []
