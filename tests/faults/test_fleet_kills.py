"""Processes of the fleet are killed in the middle of a run, and the run goes on.

The environments tell in every observation who they are, their episode and their step, and the
agent's actions follow from the step, so the replay's files show whether anything is missing, twice
there, out of order, or with an action that was not the one taken.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest
from fleet_parts import (
    CountingAgent,
    Paced,
    Witness,
    check_counts,
    check_order,
    dummy_with_its_id,
    left_behind,
    parts,
    rows,
    small_run,
    stored_streams,
)

from dreamfleet.checkpoint import read_checkpoint
from dreamfleet.parallel import combined
from dreamfleet.roles.runtime import STOP_SIGNAL

LENGTH = 25
FAULTS = [
    ("replay", SIGKILL),
    ("replay-1", STOP_SIGNAL),  # it ends in order, as ten seconds after a SIGTERM of its own
    ("logger", SIGKILL),
    ("env-0", SIGKILL),
    ("agent", STOP_SIGNAL),  # killed in `test_several_actors.py`
]


def stored(logdir: Path) -> dict[int, dict[str, Any]]:
    """The steps of each environment."""
    return stored_streams(logdir / "replay") | stored_streams(logdir / "replay-1")


def test_nothing_is_lost_or_doubled_when_processes_are_killed(tmp_path: Path) -> None:
    """Neither steps nor counts nor scores nor the ratio; and the run that it leaves is resumed."""
    config = small_run(
        tmp_path,
        on_failure="restart",
        steps=0,
        target_score=2.0,  # what an episode scores, once the witness lets it: the end of this run
        log_every=0.2,
        save_every=0.2,
        train_ratio=0.2,
        replay_shards=2,
    )
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    witness = Witness(tmp_path, *FAULTS)
    combined(**fleet, args=config, say=witness)
    # No other process than those that got the signals.
    assert witness.restarts == [title for title, _ in FAULTS], "\n".join(witness.lines)
    assert left_behind() == []
    found = stored(tmp_path)
    assert sorted(found) == list(range(config.envs))
    for envid, stream in found.items():
        check_order(stream, cuts=1 + (envid in (0, 1)))
    snapshot = check_counts(tmp_path, found)
    metrics, total = rows(tmp_path / "metrics.jsonl"), snapshot.step
    assert metrics[-1]["step"] == total
    newest = {key: value for row in metrics for key, value in row.items()}
    assert 0 < newest["replay-1/steps"] < newest["replay/steps"] <= total
    assert newest["replay/streams"] == 4
    assert newest["replay/skipped_updates"] == 0 < newest["replay/updates"]
    # Every episode that was stored from its first to its last step has its score, once.
    complete = [
        float(stream["reward"][end - LENGTH : end + 1].sum())
        for stream in found.values()
        for end in np.flatnonzero(stream["vector"][:, 2].astype(int) == LENGTH)
    ]
    scores = rows(tmp_path / "scores.jsonl")
    assert len(scores) == len({row["id"] for row in scores}) == len(complete) > 0
    assert {row["episode/length"] for row in scores} == {LENGTH}
    assert sum(row["episode/score"] for row in scores) == pytest.approx(sum(complete))
    # The ratio held: as many sequences were handed out as were due.
    ratio, minsize = config.train_ratio / config.batch_length, config.envs * config.window
    due, tolerance = ratio * (total - minsize), config.limiter_tolerance
    # A restart forgives what a batch was allowed to take beyond the tolerance.
    most = due + (1 + len(FAULTS)) * config.batch_size
    samples = snapshot.parts["replay"]["samples"]
    assert due - tolerance - (tolerance + 8) * max(ratio, 1) <= samples <= most

    more = small_run(tmp_path, steps=total + 200, save_every=0, replay_shards=2)
    fleet = parts(more, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
    combined(**fleet, args=more)
    after = check_counts(tmp_path, stored(tmp_path))
    assert after.step >= more.steps
    assert after.parts["replay"]["samples"] > samples


def test_a_damaged_checkpoint_is_skipped_and_the_counts_are_right(tmp_path: Path) -> None:
    for steps in (200, 400, 600):
        config = small_run(tmp_path, steps=steps, save_every=0, launcher="serial")
        if steps == 600:
            newest, older = sorted((tmp_path / "ckpt" / "agent").iterdir(), reverse=True)
            assert read_checkpoint(older).step < 300
            manifest = newest / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-20])
        fleet = parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
        combined(**fleet, args=config)
    assert "This checkpoint is skipped." in (tmp_path / "logs" / "serial.log").read_text()
    assert 600 <= check_counts(tmp_path, stored_streams(tmp_path / "replay")).step < 700


FOLLOWS = """
import os, signal, sys
from dreamfleet.roles import runtime
runtime._FOLLOW_SECONDS = 0.1
runtime.obey_supervisor()
stop = runtime.stop_event()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(0 if stop.wait(60) else 7)
"""


def test_a_worker_that_gets_a_sigterm_alone_follows_it_after_a_while() -> None:
    """In `test_train_command.py` all processes get it, and leave in the supervisor's order."""
    assert subprocess.run([sys.executable, "-c", FOLLOWS], check=False).returncode == 0
