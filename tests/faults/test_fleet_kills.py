"""A process of the fleet is killed in the middle of a run, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fleet_parts import (
    CountingAgent,
    dummy_with_its_id,
    left_behind,
    parts,
    small_run,
    stored_streams,
)

from dreamfleet.parallel import combined

STEPS = 3000


class Assassin:
    """Kills a process once, as soon as the run has made steps. Called by the supervisor itself,
    so that the run cannot be over before."""

    def __init__(self, title: str) -> None:
        self._title = f"dreamfleet {title}"
        self.lines: list[str] = []
        self.done = False

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self.done or not line.startswith("step ") or line.startswith("step 0"):
            return
        self.done = True
        for child in psutil.Process().children(recursive=True):
            if " ".join(child.cmdline()).strip() == self._title:
                child.kill()


def kill_one(tmp_path: Path, title: str) -> dict[int, dict[str, Any]]:
    config = small_run(
        tmp_path, on_failure="restart", steps=STEPS, log_every=0.2, save_every=0.2, train_ratio=0.2
    )
    fleet = parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
    assassin = Assassin(title)
    combined(**fleet, args=config, say=assassin)
    assert assassin.done
    restarts = [line for line in assassin.lines if "is started again" in line]
    assert [line.split()[0] for line in restarts] == [title]
    assert left_behind() == []
    return stored_streams(tmp_path / "replay")


@pytest.mark.parametrize("title", ["replay", "logger"])
def test_nothing_is_lost_or_doubled_when_a_server_is_killed(tmp_path: Path, title: str) -> None:
    found = kill_one(tmp_path, title)
    for stream in found.values():
        episode, step = stream["vector"][:, 1].astype(int), stream["vector"][:, 2].astype(int)
        assert (episode * 26 + step).tolist() == list(range(len(step)))
        assert stream["action"].tolist() == (step % 5).tolist()
    assert sum(len(stream["action"]) for stream in found.values()) >= STEPS


@pytest.mark.parametrize("title", ["agent", "env-0"])
def test_episodes_are_whole_from_their_start_when_a_player_is_killed(
    tmp_path: Path, title: str
) -> None:
    found = kill_one(tmp_path, title)
    for stream in found.values():
        step = stream["vector"][:, 2].astype(int)
        assert stream["is_first"].tolist() == (step == 0).tolist()
        # A step follows the one before it, or begins an episode.
        assert np.all((step[1:] == step[:-1] + 1) | (step[1:] == 0))
        assert stream["action"].tolist() == (step % 5).tolist()
