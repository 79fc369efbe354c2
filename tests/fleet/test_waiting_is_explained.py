"""Runs that make no progress say which role waits for which, and why."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import (
    CountingAgent,
    SlowLearner,
    Troubled,
    dummy_with_its_id,
    left_behind,
    parts,
    sleep_for_ever,
    small_run,
)

from dreamfleet.parallel import combined


class Understood(Exception):
    pass


class Reader:
    """Ends the run once a line has said all that was to be said."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder, self._words = folder, words
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if all(words in line for words in self._words):
            (self._folder / "go").touch()
            raise Understood


def stand_still(tmp_path: Path, changes: dict[str, Any], words: list[str], **more: Any) -> None:
    settings = {"steps": 0, "log_every": 0.5, "train_ratio": 4.0, "env_timeout": 0.0, **more}
    config = small_run(tmp_path, duration=240.0, **settings)  # if the line does not come, it ends
    base: dict[str, Any] = {"make_agent": CountingAgent, "make_env_train": dummy_with_its_id}
    fleet = parts(config, **{**base, **changes})
    with pytest.raises(Understood):
        combined(**fleet, args=config, say=Reader(tmp_path, "Waiting: ", *words))
    assert left_behind() == []


def test_a_limiter_that_holds_the_actor(tmp_path: Path) -> None:
    words = [
        "the actor waits for the replay to take 2 batches of steps",
        "collecting is ahead of training and waits until",
    ]
    stand_still(tmp_path, {"make_agent": partial(SlowLearner, tmp_path)}, words)


def test_a_batch_that_is_not_full_an_environment_that_hangs_and_a_limiter_that_holds_the_learner(
    tmp_path: Path,
) -> None:
    words = [
        "it has 1 of 2 observations, and uses a smaller batch after 1000 s",
        "no observation from",
        "training is ahead of collecting and waits for",
    ]
    make = partial(Troubled, tmp_path, sleep_for_ever)
    settings = {"envs": 2, "envs_per_process": 1, "actor_batch": 2, "actor_wait": 1000.0}
    stand_still(tmp_path, {"make_env_train": make}, words, **settings)


def test_a_replay_that_never_comes(tmp_path: Path) -> None:
    words = ["the learner waits for the replay, which 'dreamfleet role replay' starts elsewhere"]
    with tempfile.TemporaryDirectory(prefix="fleet-") as sockets:
        settings = {"remote_replay": True, "replay_addr": f"ipc://{sockets}/replay"}
        stand_still(tmp_path, {}, words, **settings)
    # The agent has ended by itself, and was not left to be killed.
    assert "stopped before its first update" in (tmp_path / "logs" / "agent.log").read_text()
