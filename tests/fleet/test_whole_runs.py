"""Whole runs over real processes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import (
    CountingAgent,
    Prioritising,
    Raising,
    Together,
    broken_replay,
    dummy_with_its_id,
    left_behind,
    logged,
    parts,
    rows,
    run_until,
    small_run,
    stored_streams,
)

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.fleet.supervisor import FleetError
from dreamfleet.parallel import combined
from dreamfleet.replay import ReplayConfig
from dreamfleet.replay.config import Fractions

LENGTH = 25


def check_nothing_lost(found: dict[int, dict[str, Any]]) -> int:
    """Every step an environment made is there once, in order, with the action that was taken."""
    for stream in found.values():
        episode, step = stream["vector"][:, 1].astype(int), stream["vector"][:, 2].astype(int)
        number = episode * (LENGTH + 1) + step
        assert number.tolist() == list(range(len(number)))
        assert stream["is_first"].tolist() == (step == 0).tolist()
        assert stream["is_last"].tolist() == (step == LENGTH).tolist()
        assert stream["action"].tolist() == (step % 5).tolist()
    return sum(len(stream["action"]) for stream in found.values())


@pytest.mark.parametrize(("envs_per_process", "actor_batch"), [(1, 0), (4, 3)])
def test_every_step_is_stored_once_in_order_with_its_action(
    tmp_path: Path, envs_per_process: int, actor_batch: int
) -> None:
    """However long an environment that is connected sends nothing."""
    config = small_run(
        tmp_path,
        envs_per_process=envs_per_process,
        actor_batch=actor_batch,
        episode_timeout=1e-6,
        log_every=0.01,
    )
    make_env = partial(Together, tmp_path, config.envs)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=make_env)
    combined(**fleet, args=config)
    found = stored_streams(tmp_path / "replay")
    assert sorted(found) == [0, 1, 2, 3]
    total = check_nothing_lost(found)
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert total == snapshot.step >= 600
    scores = rows(tmp_path / "scores.jsonl")
    assert {row["episode/score"] for row in scores} == {2.0}
    times = [row["time"] for row in scores]
    assert times == sorted(times)
    assert time.time() - 3600 < times[0] <= times[-1] <= time.time()
    assert {row["episode/length"] for row in scores} == {LENGTH}
    for stream in found.values():
        # The actor uses what the learner has learned meanwhile, and never falls back.
        assert (np.diff(stream["updates"]) >= 0).all()
        assert len(np.unique(stream["updates"])) > 3


def test_evaluation_data_is_kept_apart(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=0, envs=2, eval_envs=2, report_every=0.2, train_ratio=8.0)
    fleet = parts(
        config,
        make_agent=CountingAgent,
        make_env_train=dummy_with_its_id,
        make_env_eval=dummy_with_its_id,
    )
    run_until(config, fleet, lambda: {"eval/score", "report/size"} <= logged(tmp_path))
    assert sorted(stored_streams(tmp_path / "replay")) == [0, 1]
    evaluation = stored_streams(tmp_path / "eval_replay")
    assert sorted(evaluation) == [2, 3]
    check_nothing_lost(evaluation)
    assert any(row.get("report/size") == 2 for row in rows(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("changes", "role", "words"),
    [
        ({"make_env_train": Raising}, "env-", "the pole is broken"),
        ({"make_agent": lambda: CountingAgent("policy")}, "agent", "the policy is broken"),
        ({"make_agent": lambda: CountingAgent("train")}, "agent", "the training is broken"),
        ({"make_replay_train": broken_replay}, "replay", "the disk is broken"),
    ],
    ids=["environment", "policy", "training", "replay"],
)
def test_the_first_failure_ends_the_run_and_is_shown(
    tmp_path: Path, changes: dict[str, Any], role: str, words: str
) -> None:
    config = small_run(tmp_path, steps=0)
    if role == "replay":
        changes = {"make_replay_train": partial(broken_replay, config, "add_batch")}
    base = {"make_agent": CountingAgent, "make_env_train": dummy_with_its_id}
    with pytest.raises(FleetError, match=words) as error:
        combined(**parts(config, **{**base, **changes}), args=config)
    assert str(error.value).startswith(role)
    assert "Traceback" in str(error.value)
    assert left_behind() == []


def test_an_environment_that_fails_at_once_each_time_ends_the_run(tmp_path: Path) -> None:
    """Its process does not start over: the second failure without progress is the last."""
    config = small_run(tmp_path, on_failure="restart", max_restarts=1, steps=0, envs=1)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Raising, after=5))
    lines: list[str] = []
    words = r"(?s)the pole is broken.*Environment 0 failed 2 times .*raise max_restarts \(now 1\)"
    with pytest.raises(FleetError, match=words):
        combined(**fleet, args=config, say=lines.append)
    assert not any("is started again" in line for line in lines)


@pytest.mark.parametrize("priority", [0.0, 1.0])
def test_priorities_that_the_learner_sends_decide_what_is_sampled(
    tmp_path: Path, priority: float
) -> None:
    fractions = Fractions(uniform=1.0 - priority, priority=priority)
    replay = ReplayConfig(chunk=64, online=False, fractions=fractions)
    # A batch waits for all four environments, so that each of them makes a quarter of the steps.
    together = {"envs_per_process": 4, "actor_batch": 4, "actor_wait": 1000.0}
    config = small_run(
        tmp_path, launcher="serial", steps=500, train_ratio=16.0, replay=replay, **together
    )
    fleet = parts(config, make_agent=Prioritising, make_env_train=dummy_with_its_id)
    combined(**fleet, args=config)
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    share = float(snapshot.parts["agent"]["share"])
    # One of four environments; new sequences, whose priority is infinite, still come first.
    assert share > 0.5 if priority else 0.1 < share < 0.4


def test_a_run_ends_with_the_replay_ratio_that_was_asked_for(tmp_path: Path) -> None:
    """Nothing is trained before there is enough data, which is half of this run."""
    sizes: dict[str, Any] = {"envs": 2, "batch_size": 16, "batch_length": 6, "launcher": "serial"}
    config = small_run(tmp_path, steps=200, train_ratio=12.0, **sizes)
    lines: list[str] = []
    combined(**parts(config, make_agent=CountingAgent), args=config, say=lines.append)
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    updates = snapshot.parts["run"]["updates"]
    assert snapshot.parts["agent"]["updates"] == updates
    assert updates == int(12.0 * snapshot.step / (16 * 6))
    [ratio] = [
        row["learner/replay_ratio"]
        for row in rows(tmp_path / "metrics.jsonl")
        if row.get("learner/updates") == updates
    ][-1:]
    assert ratio == pytest.approx(12.0, abs=16 * 6 / 200)
    # A run that never had enough data ends, too.
    short = small_run(tmp_path / "short", steps=40, **sizes)
    combined(**parts(short, make_agent=CountingAgent), args=short)
    # The same again has nothing to make up for, and neither has one whose ratio was raised since.
    combined(**parts(config, make_agent=CountingAgent), args=config)
    again = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert again.parts["run"]["updates"] == updates
