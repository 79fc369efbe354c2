"""The logger's counts and episodes, and how it treats its outputs."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import rows, small_run

from dreamfleet.fleet.status import newest_metrics
from dreamfleet.metrics import JsonlOutput
from dreamfleet.metrics.evaluations import evaluation_from
from dreamfleet.roles import logger
from dreamfleet.roles.health import Health
from dreamfleet.roles.logger import RECENT_EPISODES, BackgroundOutput, Logger, ScoreReader


class Kept:
    """An output that keeps what it is given; it can be held up."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.entered.set()
        assert self.go.wait(60)
        self.rows.append((step, dict(metrics)))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def keeper(tmp_path: Path, **changes: Any) -> tuple[Logger, Kept]:
    output = Kept()
    return Logger(output, small_run(tmp_path, **changes)), output


def scored(
    log: Logger, *scores: float, last: int, steps: int = 100, shard: int = 0, name: str = "train"
) -> int:
    """A replay that holds so many steps tells of episodes, the last of which ended at a tick."""

    def episodes(scores: tuple[float, ...]) -> dict[str, Any]:
        count = len(scores)
        ticks = np.arange(last - count + 1, last + 1)
        return {"epoch": "e1", "episodes": np.array([ticks, scores, ticks * 0 + 2]).T}

    found = {"train": episodes(()), "eval": episodes(()), "steps": steps, "tick": steps}
    return log.scored(shard, {**found, name: episodes(scores)})


def play(
    keeper: Logger, step: int, rewards: list[float], *, envid: int = 1, is_eval: bool = False,
    video: bool = False, until: int | None = None,
) -> bool:  # fmt: skip
    """One episode, or its steps until one of them; returns what the logger answered last."""
    reached = False
    for index, reward in enumerate([0.0, *rewards][:until]):
        reached = keeper.tran(
            step,
            np.array([envid]),
            is_eval,
            {
                "reward": np.array([reward], np.float32),
                "is_first": np.array([index == 0]),
                "is_last": np.array([index == len(rewards)]),
                "is_terminal": np.array([False]),
                "log/speed": np.array([float(index)]),
            },
            {"image": np.full((1, 4, 4, 3), index, np.uint8)} if video else {},
        )
    return reached


def test_episodes_are_scored_and_their_logs_averaged_summed_and_peaked(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    play(log, 10, [1.0, 2.0])
    play(log, 20, [3.0, 4.0], envid=9, is_eval=True)
    log.close()
    assert output.closed
    step, metrics = output.rows[-1]
    assert step == 20
    assert metrics["episode/score"] == 3.0
    assert metrics["episode/length"] == 2.0
    assert metrics["eval/score"] == 7.0
    named = {key: metrics[f"episode/log/speed/{key}"] for key in ("avg", "max", "sum")}
    assert named == {"avg": 1.0, "max": 2.0, "sum": 3.0}
    assert metrics["episodes/finished"] == metrics["eval_episodes/finished"] == 1
    assert rows(tmp_path / "scores.jsonl") == [], "the replay tells which episodes were stored"


def test_failures_are_those_that_environments_have_recorded(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    for name, count in (("env-0", 2), ("env-4", 1), ("evaluator", 0)):
        for _ in range(count):
            Health(tmp_path / "workers" / name).failed("environment 0: RuntimeError: it broke")
    play(log, 10, [1.0, 2.0])
    log.close()
    assert output.rows[-1][1]["env/failures"] == 3.0


def test_a_score_is_written_once_however_often_a_replay_tells_it(tmp_path: Path) -> None:
    """Also by the successor of a logger that was killed after it had written it."""
    log, _ = keeper(tmp_path)
    assert scored(log, 1.0, 2.0, last=10) == 2
    assert scored(log, 2.0, 3.0, last=11) == 1
    assert scored(log, 7.0, last=5, steps=40, shard=1) == 1
    assert log.read(0) == {"train": ("e1", 11), "eval": ("", 0)}
    again, _ = keeper(tmp_path)  # the first is not closed: it was killed
    assert again.status()["score"] == np.mean([1, 2, 3, 7])
    assert [again.read(shard)["train"] for shard in range(2)] == [("e1", 11), ("e1", 5)]
    assert scored(again, 3.0, 4.0, last=12) == 1
    assert scored(again, 9.0, last=3, name="eval") == 1
    found = rows(tmp_path / "scores.jsonl")
    assert [row["episode/score"] for row in found] == [1, 2, 3, 7, 4]
    # At the steps of the whole run when their last step was stored.
    assert [row["step"] for row in found] == [9, 10, 11, 105, 12]
    assert [row["id"] for row in found[2:4]] == ["0/e1/11", "1/e1/5"]
    (evaluated,) = rows(tmp_path / "eval_scores.jsonl")
    assert (evaluated["eval/score"], evaluated["step"]) == (9.0, 100)
    again.close()
    log.close()
    for settings, score in (({"eval_envs": 1}, 9.0), ({}, None)):
        final, _ = keeper(tmp_path, **settings)
        assert final.status()["eval_score"] == score, "of a run that still evaluates all the time"
        final.close()


class Replay:
    """A client of one; it may be away."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.there = True
        self.episodes = 0

    def call(self, method: str, read: Any) -> Replay:
        assert method == "finished"
        self.asked.append(read["train"])
        return self

    def wait(self, timeout: float) -> bool:
        del timeout
        return self.there

    def stats(self) -> dict[str, float]:
        return {"connected": float(self.there)}

    def result(self) -> dict[str, Any]:
        since = self.asked[-1][1]
        ticks = np.arange(since + 1, self.episodes + 1)
        rows = np.array([ticks, ticks, ticks], np.float64).T
        train, none = ({"epoch": "e", "episodes": each} for each in (rows, rows[:0]))
        return {"train": train, "eval": none, "steps": 9, "tick": 9}


def test_every_replay_is_asked_for_what_is_new_and_none_is_waited_for(tmp_path: Path) -> None:
    log, _ = keeper(tmp_path)
    one, other = Replay(), Replay()
    replays: Any = {0: one, 1: other}
    reader = ScoreReader(log, replays)
    one.episodes, other.there = 2, False
    reader.poll()
    reader.poll()
    assert one.asked == [("", 0), ("e", 2)]
    assert other.asked == [("", 0)], "one question at a time"
    one.episodes, other.episodes, other.there = 4, 1, True
    reader.poll(60.0)
    assert one.asked == [("", 0), ("e", 2), ("e", 2), ("e", 4)], "until it has nothing new"
    assert log.read(1)["train"] == ("e", 1)
    log.close()


def test_a_logger_that_was_killed_goes_on_from_its_step(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    for step in (100, 70):
        log = Logger(JsonlOutput(tmp_path / "metrics.jsonl"), config)
        log.add(-1, {"loss": 0.0})
        log.add(step, {"loss": 1.0})
        log.add(40, {"eval/score": 3.0, "eval/step": 40.0})
        log.close()
    found = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in found if "loss" in row] == [100, 100, 100]
    assert [row["eval/step"] for row in found if "eval/step" in row] == [40, 40]
    steps = [row["step"] for row in found]
    assert steps == sorted(steps), "an evaluation stands where it ended"
    shutil.rmtree(tmp_path / "ckpt")  # another run, in an old directory
    log = Logger(JsonlOutput(tmp_path / "metrics.jsonl"), config)
    log.add(5, {"loss": 2.0})
    log.close()
    assert rows(tmp_path / "metrics.jsonl")[-1]["step"] == 5


def test_the_status_is_recorded_where_displays_read_it(tmp_path: Path) -> None:
    log, _ = keeper(tmp_path)
    log.add(100, {"loss": np.float32(1.5), "learner/start": "from scratch", "bad": np.nan})
    log.record()
    found = newest_metrics(tmp_path)
    assert (found["step"], found["loss"], found["learner/start"]) == (100, 1.5, "from scratch")
    assert "bad" not in found
    log.close()


def test_the_step_never_falls_back(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    log.add(-1, {"loss": 0.0})  # the step is not known yet: not written
    log.add(100, {"loss": 1.0})
    log.add(-1, {"loss": 2.0})
    play(log, 50, [1.0])
    log.close()
    assert [step for step, _ in output.rows] == [100, 100, 100]
    assert log.status()["step"] == 100


def test_the_target_is_reached_by_the_mean_of_enough_training_episodes(tmp_path: Path) -> None:
    log, _ = keeper(tmp_path, target_score=2.0)
    reached = []
    for number, score in enumerate([1.0, 3.0] * (RECENT_EPISODES // 2) + [-50.0]):
        scored(log, score, last=number + 1)
        reached.append(play(log, 1, [0.0]))
    assert reached == [False] * (RECENT_EPISODES - 1) + [True, False]
    log.close()


def test_the_target_is_judged_by_evaluation_episodes_where_there_are_any(tmp_path: Path) -> None:
    log, _ = keeper(tmp_path, target_score=2.0, eval_envs=1)
    scored(log, *[5.0] * RECENT_EPISODES, last=RECENT_EPISODES)
    assert not play(log, 1, [5.0])
    answers = []
    for number in range(RECENT_EPISODES):
        scored(log, 5.0, last=number + 1, name="eval")
        answers.append(play(log, 1, [5.0], envid=9, is_eval=True))
    assert answers == [False] * (RECENT_EPISODES - 1) + [True]
    assert log.status()["eval_score"] == 5.0
    (row,) = rows(tmp_path / "evaluations.jsonl")
    assert (row["kind"], row["step"], row["mean"]) == ("interleaved", 100, 5.0)
    assert evaluation_from(row).returns == [5.0] * RECENT_EPISODES
    log.close()


def test_an_environment_that_is_gone_leaves_no_episode_behind(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    for envid in (1, 2):
        play(log, 1, [1.0, 1.0], envid=envid, until=2)
    log.gone(np.array([1]))
    status = log.status()
    assert (status["running"], status["timed_out"]) == (1, 1)
    log.close()
    assert output.rows[-1][1]["episodes/timed_out"] == 1


def test_a_run_without_a_target_never_reaches_it(tmp_path: Path) -> None:
    log, _ = keeper(tmp_path)
    scored(log, *[1e9] * RECENT_EPISODES, last=RECENT_EPISODES)
    assert not play(log, 1, [1e9])
    log.close()


def test_the_filmed_episode_is_written_as_a_video(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    play(log, 5, [1.0, 1.0], envid=0, video=True)
    play(log, 6, [1.0, 1.0], envid=0)
    log.close()
    videos = [value for _, metrics in output.rows for k, value in metrics.items() if "video" in k]
    assert len(videos) == 1
    assert videos[0][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert log.status()["finished"] == 2


def test_an_episode_that_is_filmed_is_counted_once_also_in_evaluation(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    play(log, 5, [1.0, 2.0], envid=0, is_eval=True, video=True)
    log.close()
    assert log.status()["finished"] == 0, "it is no training episode"
    metrics = output.rows[-1][1]
    assert (metrics["eval/score"], metrics["eval_episodes/finished"]) == (3.0, 1)
    assert "episode/score" not in metrics


def test_no_call_waits_for_a_slow_output_and_nothing_is_lost(tmp_path: Path) -> None:
    log, output = keeper(tmp_path)
    output.go.clear()
    log.add(1, {"loss": 1.0})
    assert output.entered.wait(60)
    log.add(2, {"loss": 2.0})
    play(log, 3, [1.0])
    assert log.status()["step"] == 3
    assert output.rows == []
    output.go.set()
    log.close()
    assert [metrics.get("loss") for _, metrics in output.rows] == [1.0, 2.0, None]


def test_an_output_that_fails_does_not_end_the_writing(tmp_path: Path) -> None:
    class Failing(Kept):
        def write(self, step: int, metrics: Mapping[str, Any]) -> None:
            if "bad" in metrics:
                raise OSError("the disk is full")
            super().write(step, metrics)

    output = Failing()
    writer = BackgroundOutput(output)
    writer.write(1, {"bad": 1.0})
    writer.write(2, {"good": 1.0})
    writer.close()
    assert output.rows == [(2, {"good": 1.0})]
    assert output.closed


def test_evaluations_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log, _ = keeper(tmp_path, eval_envs=1)
    with monkeypatch.context() as patch:
        patch.setattr(logger, "append_evaluation", full)
        scored(log, *[1.0] * 20, last=20, name="eval")
    scored(log, 1.0, last=21, name="eval")
    assert [row["episodes"] for row in rows(tmp_path / "evaluations.jsonl")] == [21]
    log.close()
