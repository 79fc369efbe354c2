"""What a run promises when nothing fails: its ratio, its end, its order, its pictures."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet_parts import (
    CountingAgent,
    NeverCompiled,
    dummy_with_its_id,
    logged,
    parts,
    rows,
    run_until,
    small_run,
)

from dreamfleet.checkpoint import Checkpoint, Snapshot
from dreamfleet.config import RunConfig
from dreamfleet.parallel import combined


def saved(logdir: Path) -> Snapshot:
    snapshot = Checkpoint(logdir / "ckpt" / "agent").load()
    assert snapshot is not None
    return snapshot


def steps_before_training(config: RunConfig) -> int:
    return max(config.batch_size, config.envs) * config.window


@pytest.mark.parametrize(
    ("ratio", "sizes"),
    [
        (1.0, {"batch_size": 2, "steps": 4000}),
        (32.0, {"batch_size": 4, "steps": 1500}),
    ],
)
def test_the_train_ratio_is_held(tmp_path: Path, ratio: float, sizes: dict[str, int]) -> None:
    config = small_run(tmp_path, train_ratio=ratio, batch_length=16, **sizes)
    combined(**parts(config), args=config)
    snapshot = saved(tmp_path)
    trained = snapshot.parts["run"]["updates"] * config.batch_size * config.batch_length
    due = ratio * (snapshot.step - steps_before_training(config))
    assert trained == pytest.approx(due, rel=0.05)
    # What the run says of itself is what it did.
    said = [row for row in rows(tmp_path / "metrics.jsonl") if "learner/replay_ratio" in row][-1]
    assert said["learner/replay_ratio"] == pytest.approx(trained / snapshot.step, rel=0.05)


def test_without_a_train_ratio_neither_side_waits_for_the_other(tmp_path: Path) -> None:
    bound = 400

    class TakingTurns(CountingAgent):
        """Acts without learning for longer than any limiter would let it, and then the other way
        round."""

        def __init__(self) -> None:
            super().__init__()
            self._changed = threading.Condition()
            self._acted = 0

        def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
            with self._changed:
                self._acted += 1
                self._changed.notify_all()
                if self._acted > bound:
                    assert self._changed.wait_for(lambda: self._updates > bound, 60)
            return super().policy(carry, obs, mode)

        def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
            with self._changed:
                assert self._changed.wait_for(lambda: self._acted > bound, 60)
                result = super().train(carry, batch)
                self._changed.notify_all()
            return result

    config = small_run(tmp_path, train_ratio=0.0, steps=4 * bound + 400)
    fleet = parts(config, make_agent=TakingTurns, make_env_train=dummy_with_its_id)
    combined(**fleet, args=config)
    assert saved(tmp_path).parts["run"]["updates"] > bound


@pytest.mark.parametrize("eval_envs", [0, 1])
def test_a_run_ends_when_its_target_score_is_reached(tmp_path: Path, eval_envs: int) -> None:
    # Each episode of the dummy scores 2; without the target this run would have no end.
    config = small_run(tmp_path, steps=0, target_score=2.0, eval_envs=eval_envs)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
    combined(**fleet, args=config)
    assert saved(tmp_path).step > 0
    metrics = rows(tmp_path / "metrics.jsonl")
    prefix = "eval_episodes" if eval_envs else "episodes"
    assert metrics[-1][f"{prefix}/finished"] >= 20


def test_the_actor_does_not_act_before_the_checkpoint_is_restored(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=100, launcher="serial", replay_shards=2)
    fleet = parts(config, make_env_train=dummy_with_its_id)
    combined(**{**fleet, "make_agent": CountingAgent}, args=config)
    ready, acted = threading.Event(), threading.Event()
    acted_early: list[bool] = []

    class Patient(CountingAgent):
        def load(self, state: Mapping[str, Any], regex: str | None = None) -> None:
            # By now an environment looks for its actor; it has to go on looking.
            assert ready.wait(60)
            acted_early.append(acted.wait(1.0))
            super().load(state, regex)

        def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
            acted.set()
            return super().policy(carry, obs, mode)

    def make_env(envid: int) -> Any:
        ready.set()
        return dummy_with_its_id(envid)

    config = small_run(tmp_path, steps=200, launcher="serial", replay_shards=2)
    combined(**{**fleet, "make_agent": Patient, "make_env_train": make_env}, args=config)
    assert acted_early == [False]
    assert acted.is_set()


def test_videos_and_what_the_run_did_are_written_down(tmp_path: Path) -> None:
    wanted = {
        "actor/steps_per_second",
        "actor/fill",
        "actor/wait_seconds",
        "actor/environments",
        "actor/server/requests",
        "actor/replay_client/inflight",
        "actor/logger_client/inflight",
        "learner/updates_per_second",
        "learner/env_steps_per_second",
        "learner/timer/wait/frac",
        "learner/usage/memory",
        "train/loss",
        "report/size",
        "eval/size",
        "episode/score",
        "episode/log/step/max",
        "eval/score",
        "episodes/abandoned",
        "episodes/timed_out",
        "replay/limiter/avail",
    }
    media = tmp_path / "media" / "episode-video-image"
    config = small_run(tmp_path, steps=0, report_every=0.2, eval_envs=1, train_ratio=8.0)
    fleet = parts(config, make_agent=CountingAgent, make_env_train=dummy_with_its_id)
    run_until(config, fleet, lambda: wanted <= logged(tmp_path) and media.exists())
    videos = list(media.iterdir())
    assert videos
    assert all(video.read_bytes()[4:8] == b"ftyp" for video in videos)  # complete MP4


def test_a_run_writes_only_to_the_outputs_it_was_told(tmp_path: Path) -> None:
    config = small_run(tmp_path, outputs=("media",))
    combined(**parts(config), args=config)
    assert (tmp_path / "media").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_that_is_ended_while_it_compiles_ends_at_once(tmp_path: Path) -> None:
    """There is nothing to save, and code that compiles cannot be interrupted."""
    config, started = small_run(tmp_path), tmp_path / "started"
    lines: list[str] = []

    def when_it_compiles() -> None:
        if started.exists():
            signal.raise_signal(signal.SIGINT)

    fleet = {**parts(config), "make_agent": partial(NeverCompiled, started)}
    with pytest.raises(KeyboardInterrupt):
        combined(**fleet, args=config, say=lines.append, tick=when_it_compiles)
    assert lines[-1] == "There is no checkpoint: the run ended before its first one."
    assert not [line for line in lines if "did not stop" in line]
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert "stopped before its first update" in log
