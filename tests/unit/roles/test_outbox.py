"""Scores on their way from the replay to the logger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import rows

from dreamfleet.metrics import ScoresFile
from dreamfleet.roles.outbox import MOST_SENT, Outbox
from dreamfleet.transport import Disconnected


class Answer:
    def __init__(self, logger: FakeLogger) -> None:
        self._logger = logger

    def done(self) -> bool:
        return self._logger.answers

    def result(self) -> None:
        if self._logger.lost:
            self._logger.lost = False
            raise Disconnected("The logger was killed.")


class FakeLogger:
    """Writes what it gets at once; its answer may be late, or lost."""

    def __init__(self, folder: Path) -> None:
        self.scores = ScoresFile(folder / "scores.jsonl")
        self.answers, self.lost = True, False
        self.calls: list[int] = []

    def call(self, method: str, ids: list[str], episodes: dict[str, Any]) -> Any:
        assert method == "ended"
        self.calls.append(len(ids))
        for name, score in zip(ids, episodes["score"].tolist(), strict=True):
            self.scores.add(1, score, name=name)
        return Answer(self)


def over(*scores: float) -> dict[str, Any]:
    count = len(scores)
    return {"step": np.ones(count, int), "score": np.array(scores), "length": np.ones(count, int)}


def scores(folder: Path) -> list[float]:
    return [row["episode/score"] for row in rows(folder / "scores.jsonl")]


def test_scores_are_sent_until_the_logger_has_answered(tmp_path: Path) -> None:
    logger: Any = FakeLogger(tmp_path)
    outbox = Outbox(tmp_path / "episodes", 0)
    logger.answers = False
    for seq in range(3):
        outbox.note(seq + 1, "actor", seq, over(seq, seq + 10.0))
        outbox.settle(seq + 1)
        outbox.send(logger)
    assert logger.calls == [2], "one message at a time, and nobody waits"
    logger.answers, logger.lost = True, True
    outbox.send(logger)  # the answer is lost
    outbox.flush(logger, 60.0)
    assert logger.calls == [2, 6]
    assert len(outbox) == 0
    assert scores(tmp_path) == [0, 10, 1, 11, 2, 12]
    assert len(Outbox(tmp_path / "episodes", 3)) == 0


def test_a_score_counts_exactly_if_its_steps_do(tmp_path: Path) -> None:
    """The replay is killed after each of its writes."""
    path, logger = tmp_path / "episodes", FakeLogger(tmp_path)
    killed = Outbox(path, 0)
    killed.note(4, "actor", 1, over(1.0))
    killed.settle(4)  # committed, and not sent
    killed.note(8, "actor", 2, over(2.0, 3.0))  # killed before the commit
    outbox = Outbox(path, 4)
    assert len(outbox) == 1
    # Another batch takes the ticks of the one that was never committed.
    outbox.note(9, "other", 1, over(4.0))
    outbox.settle(9)
    again = Outbox(path, 9)  # killed before it could send
    assert len(again) == 2
    again.note(12, "other", 2, over(5.0))
    again.settle(9)  # it was refused, or was there before
    again.flush(logger, 60.0)  # type: ignore[arg-type]
    assert scores(tmp_path) == [1, 4]
    assert len(Outbox(path, 12)) == 0


def test_many_scores_go_in_several_messages(tmp_path: Path) -> None:
    logger: Any = FakeLogger(tmp_path)
    outbox = Outbox(tmp_path / "episodes", 0)
    outbox.note(1, "actor", 1, over(*range(MOST_SENT + 5)))
    outbox.settle(1)
    outbox.flush(logger, 60.0)
    assert logger.calls == [MOST_SENT, 5]
    assert scores(tmp_path) == list(range(MOST_SENT + 5))


def waiting(outbox: Outbox) -> set[tuple[str, float]]:
    return {(row["id"], row["score"]) for row in outbox._waiting}


def test_the_file_stays_small_with_a_logger_that_is_always_behind(tmp_path: Path) -> None:
    logger, path = FakeLogger(tmp_path), tmp_path / "episodes"
    outbox = Outbox(path, 0)
    logger.answers = False
    for seq in range(3000):
        outbox.note(seq + 1, "actor", seq, over(1.0))
        outbox.settle(seq + 1)
        logger.answers = seq % 2 == 1
        outbox.send(logger)  # type: ignore[arg-type]
        assert outbox, "something always waits"
        if seq % 100 == 0:
            assert waiting(outbox) <= waiting(Outbox(path, seq + 1))
    assert path.stat().st_size < 1 << 17
    assert path.read_bytes().index(b"\0") < 2000


def test_a_kill_while_the_file_is_made_smaller_loses_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the write stops."""
    logger, path, pwrite = FakeLogger(tmp_path), tmp_path / "episodes", os.pwrite
    outbox = Outbox(path, 0)
    for seq in range(6):
        outbox.note(seq + 1, "actor", seq, over(float(seq)))
        outbox.settle(seq + 1)
        if seq == 3:
            outbox.send(logger)  # type: ignore[arg-type]
    before, all_of_them, writes = path.read_bytes(), waiting(outbox), []

    def noted(fd: int, data: bytes, offset: int) -> int:
        writes.append((data, offset))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    outbox.send(logger)  # type: ignore[arg-type]
    monkeypatch.undo()
    ((data, offset),) = writes
    assert path.read_bytes().index(b"\0") < before.index(b"\0") / 2
    for size in range(len(data) + 1):
        path.write_bytes(before[:offset] + data[:size] + before[offset + size :])
        assert waiting(outbox) <= waiting(Outbox(path, 6)) <= all_of_them


def test_a_damaged_file_costs_the_scores_in_it_at_most(tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    outbox = Outbox(path, 0)
    outbox.note(1, "actor", 1, over(1.0, 2.0, 3.0))
    outbox.settle(1)
    whole = path.read_bytes()
    for at in range(0, whole.index(b"\0") + 1, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 9]) + whole[at + 1 :])
        assert waiting(Outbox(path, 1)) <= waiting(outbox)


def test_a_note_takes_no_room_on_the_disk(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "episodes", 0)
    size = (tmp_path / "episodes").stat().st_size
    for seq in range(50):
        outbox.note(seq + 1, "actor", seq, over(1.0))
        outbox.settle(seq + 1)
    assert (tmp_path / "episodes").stat().st_size == size
    assert len(Outbox(tmp_path / "episodes", 50)) == 50
