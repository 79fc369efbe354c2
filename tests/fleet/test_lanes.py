"""Runs with vectorised environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleet_parts import stored_streams
from lane_worlds import LENGTH, disabled, next_step, same_step

import dreamfleet


@pytest.mark.parametrize("make", [next_step, same_step, disabled])
def test_every_step_of_every_lane_is_stored(tmp_path: Path, make: Any) -> None:
    dreamfleet.train(
        env=make,
        agent="random",
        logdir=tmp_path / "run",
        steps=400,
        envs=6,
        envs_per_process=4,
        actor_wait=0.0,
        train_ratio=1.0,
        batch_size=2,
        batch_length=8,
        eval_episodes=4,
        on_failure="stop",
    )
    found = stored_streams(tmp_path / "run" / "replay")
    assert len(found) == 6
    for stream in found.values():
        _, episode, step = stream["vector"].T.astype(int)
        last = stream["is_last"]
        length = int(step[last][0])
        assert (episode * (length + 1) + step).tolist() == list(range(len(step)))
        assert last.tolist() == (step == length).tolist()
        assert stream["is_first"].tolist() == (step == 0).tolist()
    result = dreamfleet.evaluate(tmp_path / "run", make, episodes=6, envs=3)
    assert set(result.lengths) <= {LENGTH, LENGTH + 1, LENGTH + 2}
