"""Rounds of evaluation while a run trains: one that fails costs itself only, none is recorded
twice."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import EVERY_STEP, dummy_with_its_id, rows, small_run

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.envs import make_env
from dreamfleet.fleet import play
from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import STOPPED
from dreamfleet.fleet.launchers.serial import SerialLauncher, SerialWorker
from dreamfleet.fleet.play import parallel_evaluator
from dreamfleet.metrics.outputs.jsonl import append_row
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy
from dreamfleet.transport import Server


def run(logdir: Path, **changes: Any) -> RunConfig:
    rounds = {"eval_every": 10, "eval_episodes": 2, "eval_max_steps": 5}
    return small_run(logdir, **{"envs": 1, "launcher": "serial", **rounds, **changes})


def parts_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint of a run holds."""
    env = make_env("bundled:dummy", **EVERY_STEP)
    agent = RandomAgent(env.obs_space, env.act_space)
    return {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}


@contextmanager
def evaluator(config: RunConfig, make: Any = dummy_with_its_id) -> Iterator[SerialWorker]:
    """The evaluator of a run, on a thread, which is asked to stop at the end."""
    play = partial(parallel_evaluator, make, config)
    with SerialLauncher(config.logdir) as launcher:
        worker = launcher.start(Worker("evaluator", "evaluator", play))
        yield worker
        worker.terminate()
        assert worker.wait(60) == STOPPED


def await_score(checkpoints: Checkpoint, worker: SerialWorker) -> None:
    deadline = time.monotonic() + 120
    while checkpoints.pending() is not None:
        assert time.monotonic() < deadline
        assert worker.wait(0.05) is None, worker.output()


def test_a_round_that_fails_is_noted_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint cannot be loaded, the agent of the second one raises, and the third one
    cannot be given its score."""
    load, rate = Policy.load, Checkpoint.rate
    loaded: list[Path] = []

    def failing_load(path: Path, **arguments: Any) -> Policy:
        loaded.append(path)
        if len(loaded) == 1:
            raise MemoryError("too large")
        policy = load(path, **arguments)
        if len(loaded) == 2:
            monkeypatch.setattr(policy.agent, "policy", failing_policy)
        return policy

    def failing_policy(*arguments: Any) -> Any:
        raise ValueError("not this shape")

    def failing_rate(self: Checkpoint, path: Path, score: float | None) -> None:
        if len(loaded) == 3:
            raise OSError("the disk is full")
        rate(self, path, score)

    monkeypatch.setattr(Policy, "load", failing_load)
    monkeypatch.setattr(Checkpoint, "rate", failing_rate)
    told = threading.Event()
    logger = Server("ipc://{auto}", "logger")
    logger.bind("add", lambda *_: told.set())
    checkpoints, parts = Checkpoint(tmp_path / "ckpt" / "agent"), parts_of(run(tmp_path))
    with logger, evaluator(run(tmp_path, logger_addr=logger.address)) as worker:
        for step in (10, 20):
            path = checkpoints.save(parts, step=step, pending=True)
            await_score(checkpoints, worker)
            assert loaded[-1] == path
        path = checkpoints.save(parts, step=30, pending=True)
        assert told.wait(120)
    assert checkpoints.pending() == path, "the end of the run plays it again"
    first, second, third = rows(tmp_path / "evaluations.jsonl")
    assert (first["kind"], first["step"]) == (second["kind"], 10)
    assert "too large" in first["error"]
    assert (second["step"], second["error"]) == (20, "ValueError('not this shape')")
    assert (third["step"], third["lengths"]) == (30, [5, 5])


def test_a_round_that_was_recorded_before_a_kill_is_not_recorded_again(tmp_path: Path) -> None:
    """The evaluator was killed after it had written the result, and before the checkpoint had its
    score."""
    checkpoints, row = Checkpoint(tmp_path / "ckpt" / "agent"), {"kind": "round", "step": 10}
    checkpoints.save(parts_of(run(tmp_path)), step=10, pending=True)
    append_row(tmp_path / "evaluations.jsonl", {**row, "mean": 4.5, "error": ""})
    with evaluator(run(tmp_path)) as worker:
        await_score(checkpoints, worker)
    assert [each["mean"] for each in rows(tmp_path / "evaluations.jsonl")] == [4.5]
    best = checkpoints.load("best", parts=())
    assert best is not None
    assert best.score == 4.5


def test_the_end_of_a_run_interrupts_a_round(tmp_path: Path) -> None:
    stepped = threading.Event()

    class Noticed:
        def __init__(self, envid: int) -> None:
            self._env = dummy_with_its_id(envid)
            self.obs_space, self.act_space = self._env.obs_space, self._env.act_space

        def step(self, action: Any) -> Any:
            stepped.set()
            return self._env.step(action)

    config = run(tmp_path, eval_episodes=1 << 40)
    checkpoints = Checkpoint(tmp_path / "ckpt" / "agent")
    path = checkpoints.save(parts_of(config), step=10, pending=True)
    with evaluator(config, Noticed):
        assert stepped.wait(120)
    assert checkpoints.pending() == path, "the end of the run plays it"
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_a_disk_that_is_full_for_a_moment_does_not_end_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is played once, recorded once, and its score known once there is room."""
    checkpoint, played = Checkpoint(run(tmp_path).checkpoints), []
    checkpoint.save({"agent": {"a": np.zeros(1)}}, step=100, pending=True)
    rounds = play._Rounds(run(tmp_path), None, threading.Event())  # type: ignore[arg-type]

    def once(*_: object) -> dict[str, Any]:
        played.append(1)
        return {"mean": 3.0, "error": ""}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rounds, "_play", once)
    server: Any = None
    with monkeypatch.context() as patch:
        patch.setattr(play, "append_row", full)
        assert rounds.poll(server)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "rate", full)
        assert rounds.poll(server)
    assert checkpoint.pending() is not None
    assert rounds.poll(server)
    assert rounds.poll(server)
    assert checkpoint.pending() is None, "or no round begins any more"
    assert len(played) == len(rows(tmp_path / "evaluations.jsonl")) == 1
    best = checkpoint.load("best", parts=())
    assert best is not None
    assert best.score == 3.0
