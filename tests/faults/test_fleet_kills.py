"""A process of the fleet is killed in the middle of a run, and the run goes on.

The environments tell in every observation who they are, their episode and their step, and the
agent's actions follow from the step, so the replay's files show whether anything is missing, twice
there, out of order, or with an action that was not the one taken.
"""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import (
    CountingAgent,
    Paced,
    Witness,
    dummy_with_its_id,
    left_behind,
    parts,
    rows,
    small_run,
    stored_streams,
)

from dreamfleet.checkpoint import Checkpoint, read_checkpoint
from dreamfleet.parallel import combined

LENGTH = 25


Fault = tuple[str, signal.Signals]


def run_with(tmp_path: Path, *faults: Fault, shards: int = 1) -> dict[int, dict[str, Any]]:
    """What is stored of a run whose processes get these signals, one after the other."""
    config = small_run(
        tmp_path,
        on_failure="restart",
        steps=0,
        target_score=2.0,  # what an episode scores, once the witness lets it: the end of this run
        log_every=0.2,
        save_every=0.2,
        train_ratio=0.2,
        replay_shards=shards,
    )
    fleet = parts(config, make_agent=CountingAgent, make_env_train=partial(Paced, tmp_path))
    witness = Witness(tmp_path, *faults)
    combined(**fleet, args=config, say=witness)
    # Nobody but who got the signal.
    assert witness.restarts == [title for title, _ in faults], "\n".join(witness.lines)
    assert left_behind() == []
    found = stored_streams(tmp_path / "replay")
    for shard in range(1, shards):
        found |= stored_streams(tmp_path / f"replay-{shard}")
    assert sorted(found) == list(range(config.envs))
    total = sum(len(stream["action"]) for stream in found.values())
    # Everybody has counted the same steps, whoever was killed.
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot is not None
    assert snapshot.step == snapshot.parts["replay"]["steps"] == total
    logged = [row["step"] for row in rows(tmp_path / "metrics.jsonl")]
    assert logged == sorted(logged)
    assert logged[-1] == total
    # Every episode that was stored from its first to its last step has its score, once.
    complete = [number for stream in found.values() for number in np.flatnonzero(ends(stream))]
    scores = rows(tmp_path / "scores.jsonl")
    assert len(scores) == len({row["id"] for row in scores}) == len(complete) > 0
    assert {row["episode/length"] for row in scores} == {LENGTH}
    assert sum(row["episode/score"] for row in scores) == pytest.approx(
        sum(
            float(stream["reward"][end - LENGTH : end + 1].sum())
            for stream in found.values()
            for end in np.flatnonzero(ends(stream))
        )
    )
    # The ratio held: as many sequences were handed out as were due.
    samples = snapshot.parts["replay"]["samples"]
    ratio, minsize = config.train_ratio / config.batch_length, config.envs * config.window
    due = ratio * (total - minsize)
    tolerance = config.limiter_tolerance
    # A restart forgives what a batch was allowed to take beyond the tolerance.
    most = due + (1 + len(faults)) * config.batch_size
    assert due - tolerance - (tolerance + 8) * max(ratio, 1) <= samples <= most
    return found


def ends(stream: dict[str, Any]) -> Any:
    """Where an episode has ended by itself."""
    return stream["vector"][:, 2].astype(int) == LENGTH


def ended(*titles: str) -> list[Fault]:
    return [(title, how) for title in titles for how in (signal.SIGKILL, signal.SIGTERM)]


def test_nothing_is_lost_or_doubled_when_servers_are_ended(tmp_path: Path) -> None:
    for stream in run_with(tmp_path, *ended("replay", "logger")).values():
        assert_complete(stream)


def assert_complete(stream: dict[str, Any]) -> None:
    """Every step of an environment is there, once, in order, and with the action taken."""
    episode, step = stream["vector"][:, 1].astype(int), stream["vector"][:, 2].astype(int)
    assert (episode * (LENGTH + 1) + step).tolist() == list(range(len(step)))
    assert stream["action"].tolist() == (step % 5).tolist()


def test_nothing_is_lost_or_doubled_when_shards_are_killed(tmp_path: Path) -> None:
    """Neither steps nor counts nor the ratio; and the run that it leaves behind is resumed."""
    kills = [(title, signal.SIGKILL) for title in ("replay", "replay-1")]
    for stream in run_with(tmp_path, *kills, shards=2).values():
        assert_complete(stream)
    before = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert before is not None
    newest: dict[str, Any] = {}
    for row in rows(tmp_path / "metrics.jsonl"):
        newest |= row
    assert 0 < newest["replay-1/steps"] < newest["replay/steps"] <= before.step
    assert newest["replay/streams"] == 4
    assert newest["replay/skipped_updates"] == 0 < newest["replay/updates"]
    run(tmp_path, before.step + 200, replay_shards=2)
    after = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert after is not None
    streams = [stored_streams(tmp_path / name) for name in ("replay", "replay-1")]
    total = sum(len(each["action"]) for found in streams for each in found.values())
    assert before.step + 200 <= after.step == after.parts["replay"]["steps"] == total
    assert after.parts["replay"]["samples"] > before.parts["replay"]["samples"]


def test_only_the_running_episodes_are_cut_short_when_players_are_ended(tmp_path: Path) -> None:
    for envid, stream in run_with(tmp_path, *ended("agent", "env-0")).items():
        step = stream["vector"][:, 2].astype(int)
        assert stream["is_first"].tolist() == (step == 0).tolist()
        assert stream["action"].tolist() == (step % 5).tolist()
        starts = [0, *(n for n in range(1, len(step)) if step[n] != step[n - 1] + 1)]
        assert all(step[n] == 0 for n in starts)
        ends = [step[n - 1] for n in starts[1:]]
        cut = sum(end != LENGTH for end in ends)
        # Two ends of the agent, and of the environments that are in one process two more.
        assert cut <= (4 if envid in (0, 1) else 2)


def run(logdir: Path, steps: int, **changes: Any) -> None:
    config = small_run(logdir, steps=steps, save_every=0, **changes)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
    combined(**fleet, args=config)


def test_a_run_whose_replay_was_removed_says_so_and_fills_it_again(tmp_path: Path) -> None:
    run(tmp_path / "before", 300)
    for removed in (["replay"], ["ckpt/replay"], ["replay", "ckpt/replay"]):
        logdir = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tmp_path / "before", logdir)
        for name in removed:
            shutil.rmtree(logdir / name)
        run(logdir, 600)
        snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
        assert snapshot is not None
        assert 600 <= snapshot.step == snapshot.parts["replay"]["steps"] < 700
        log = (logdir / "logs" / "replay.log").read_text()
        assert ("steps less than the run has made" in log) == (removed == ["replay"])


def test_a_damaged_checkpoint_is_skipped_and_the_counts_are_right(tmp_path: Path) -> None:
    run(tmp_path, 200)
    run(tmp_path, 400)
    newest, older = sorted((tmp_path / "ckpt" / "agent").iterdir(), reverse=True)
    assert read_checkpoint(older).step < 300
    manifest = newest / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    run(tmp_path, 600)
    assert "It is skipped." in (tmp_path / "logs" / "agent.log").read_text()
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot is not None
    found = stored_streams(tmp_path / "replay")
    total = sum(len(stream["action"]) for stream in found.values())
    assert 600 <= snapshot.step == total < 700
    logged = [row["step"] for row in rows(tmp_path / "metrics.jsonl")]
    assert logged == sorted(logged)
