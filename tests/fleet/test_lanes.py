"""Runs with vectorised environments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import fixed_address, stored_streams
from lane_worlds import LENGTH, disabled, next_step, same_step

import dreamfleet

LENGTHS = {LENGTH, LENGTH + 1, LENGTH + 2}


def check_streams(run: Path, count: int) -> None:
    """Every step of every lane is stored once, in order."""
    found = stored_streams(run / "replay")
    assert len(found) == count
    for stream in found.values():
        _, episode, step = stream["vector"].T.astype(int)
        last = stream["is_last"]
        length = int(step[last][0])
        assert (episode * (length + 1) + step).tolist() == list(range(len(step)))
        assert last.tolist() == (step == length).tolist()
        assert stream["is_first"].tolist() == (step == 0).tolist()


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (next_step, {}),
        (same_step, {"env_lanes": 2}),
        (disabled, {"launcher": "serial", "actor_batch": 3}),
        (same_step, {"actors": 2, "envs_per_process": 2}),
    ],
    ids=["processes", "lanes of a process", "serial", "several actors"],
)
def test_every_step_of_every_lane_is_stored(
    tmp_path: Path, make: Any, settings: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"envs_per_process": 4, "actor_wait": 0.0, **settings}
    dreamfleet.train(
        env=make,
        agent="random",
        logdir=tmp_path / "run",
        steps=400,
        envs=6,
        train_ratio=1.0,
        batch_size=2,
        batch_length=8,
        eval_episodes=4,
        on_failure="stop",
        **given,
    )
    check_streams(tmp_path / "run", 6)
    if not settings:
        result = dreamfleet.evaluate(tmp_path / "run", make, episodes=6, envs=3)
        assert set(result.lengths) <= LENGTHS


def test_a_machine_joins_with_lanes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dreamfleet.cli"]
    task = ["--task", "lane_worlds:next_step"]
    settings = "--agent random --steps 200 --eval-episodes 0 --batch-size 2 --batch-length 8"
    here = ["--logdir", str(tmp_path / "run"), "--bind", fixed_address().removeprefix("tcp://")]
    train = subprocess.Popen(
        [*command, "train", *task, *settings.split(), "--train-ratio", "1", "--remote-envs", *here],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert train.stdout is not None
    line = next(filter(None, (re.search(r"join '(\S+)'", text) for text in train.stdout)))[1]
    there = ["--logdir", str(tmp_path / "there"), "--envs", "3"]
    join = subprocess.Popen([*command, "join", line, *task, *there], stdout=subprocess.DEVNULL)
    try:
        said, _ = train.communicate()
        assert train.returncode == 0, said
        assert join.wait() == 0
    finally:
        join.kill()
        train.kill()
    check_streams(tmp_path / "run", 3)
