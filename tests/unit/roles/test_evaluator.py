"""The evaluator role: a round that fails costs itself only."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import EVERY_STEP, dummy_with_its_id, rows, small_run

from dreamfleet.agents import RandomAgent
from dreamfleet.checkpoint import Checkpoint
from dreamfleet.envs import make_env
from dreamfleet.fleet.launchers import Worker
from dreamfleet.fleet.launchers.local import STOPPED
from dreamfleet.fleet.launchers.serial import SerialLauncher
from dreamfleet.policy import BLUEPRINT, Blueprint, Policy
from dreamfleet.roles.env import parallel_env
from dreamfleet.roles.evaluator import parallel_evaluator
from dreamfleet.transport import Server


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
    logger = Server("inproc://{auto}", "logger")
    logger.bind("evaluated", lambda *_: told.set())
    env = make_env("bundled:dummy", **EVERY_STEP)
    agent = RandomAgent(env.obs_space, env.act_space)
    config = small_run(
        tmp_path,
        eval_every=10,
        eval_episodes=2,
        eval_max_steps=5,
        envs=1,
        evaluator_addr="inproc://{auto}",
    )
    parts = {"agent": agent.save(), BLUEPRINT: Blueprint.of(agent, config).save()}
    checkpoints = Checkpoint(tmp_path / "ckpt" / "agent")
    with logger, SerialLauncher(tmp_path) as launcher:
        config = replace(config, logger_addr=logger.address)
        make = partial(parallel_env, dummy_with_its_id, 1, config, True)
        workers = [
            launcher.start(Worker("evaluator", "evaluator", partial(parallel_evaluator, config))),
            launcher.start(Worker("env-1", "env", make)),
        ]
        for step in (10, 20):
            path = checkpoints.save(parts, step=step, pending=True)
            deadline = time.monotonic() + 120
            while checkpoints.pending() is not None:
                assert time.monotonic() < deadline
                assert workers[0].wait(0.05) is None, workers[0].output()
            assert loaded[-1] == path
        path = checkpoints.save(parts, step=30, pending=True)
        assert told.wait(120)
        for worker in workers:
            worker.terminate()
        assert [worker.wait(60) for worker in workers] == [STOPPED, STOPPED]
    assert checkpoints.pending() == path, "the end of the run plays it again"
    first, second, third = rows(tmp_path / "evaluations.jsonl")
    assert (first["kind"], first["step"]) == (second["kind"], 10)
    assert "too large" in first["error"]
    assert (second["step"], second["error"]) == (20, "ValueError('not this shape')")
    assert (third["step"], third["lengths"]) == (30, [5, 5])
