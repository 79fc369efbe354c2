"""Histories with faults of storage and network, in one process; see `tests/simulation.py`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simulation
from simulation import Failed, every_fault, every_truncation, history, watched

from dreamfleet.metrics.outputs.jsonl import JsonlFile
from dreamfleet.replay import reopening
from dreamfleet.replay.episodes import Scores
from dreamfleet.replay.positions import Positions
from dreamfleet.replay.storage.journal import Journal
from dreamfleet.roles.actor import Actor
from dreamfleet.roles.logger import Logger
from dreamfleet.roles.replay import ReplayService
from dreamfleet.roles.scaling.coordinator import ReplayCoordinator


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    with watched():
        yield


def test_nothing_is_lost_doubled_reordered_or_spliced() -> None:
    steps = failed = 0
    for seed in range(50):
        steps += history(seed).checker.steps
        failed += len(simulation.faults.done)
    assert steps > 1000
    assert failed > 30, "hardly a write has failed"


@pytest.mark.parametrize("kind", ["kill", "full", "drop"])
def test_a_fault_at_any_write_or_message(kind: str) -> None:
    """Every 15th of them; `python tests/simulation.py --every` takes all."""
    assert every_fault(4, kind, stride=15) > 5


def test_small_files_that_are_cut_off_anywhere() -> None:
    assert every_truncation(1, stride=20) > 40


def test_a_history_is_the_same_each_time() -> None:
    runs = [(history(11).checker.steps, simulation.faults.count) for _ in range(2)]
    assert runs[0] == runs[1]


# --- the checker finds what is wrong -------------------------------------------------------------


def forgets_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "seen", lambda *_: False)


def believes_uncommitted_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reopening, "valid_ticks", lambda ticks, _: int((np.asarray(ticks) > 0).sum()))


def counts_samples_in_memory(patch: pytest.MonkeyPatch) -> None:
    def sampled(self: Positions, count: int) -> None:
        self._numbers.values[1] = self.samples + count

    patch.setattr(Positions, "sampled", sampled)


def names_every_actor_alike(patch: pytest.MonkeyPatch) -> None:
    init = Actor.__init__

    def alike(self: Actor, *args: Any) -> None:
        init(self, *args)
        self.source = "actor"

    patch.setattr(Actor, "__init__", alike)


def forgets_what_episodes_scored_before_a_chunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scores, "begin_chunk", lambda *_: None)


def reads_every_score_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JsonlFile, "last_value", lambda *_: "")


def fails_now_and_then(patch: pytest.MonkeyPatch) -> None:
    """The successor of its process would answer, as if nothing had been."""
    add, calls = ReplayService.add_batch, itertools.count(1)

    def add_batch(self: ReplayService, *args: Any) -> Any:
        if next(calls) % 7 == 0:
            raise TypeError("no such argument")
        return add(self, *args)

    patch.setattr(ReplayService, "add_batch", add_batch)


def counts_a_batch_that_is_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    permit = ReplayCoordinator.permit

    def counted(self: ReplayCoordinator, _: int) -> int:
        return permit(self, self._positions.samples)

    patch.setattr(ReplayCoordinator, "permit", counted)


def writes_metrics_that_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Logger, "_is_new", lambda *_: True)


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [
        (fails_now_and_then, "the replay failed without a fault"),
        (forgets_batches, "stored twice|spliced|limiter"),
        (believes_uncommitted_steps, "message|stored twice|spliced|never sent|acknowledged"),
        (counts_samples_in_memory, "samples went back"),
        (names_every_actor_alike, "acknowledged"),
        (forgets_what_episodes_scored_before_a_chunk, "scores are missing"),
        (reads_every_score_again_after_a_restart, "a score is there twice"),
        (counts_a_batch_that_is_asked_for_again, "samples were counted twice"),
        (writes_metrics_that_are_sent_again, "metrics were written twice"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_run_that_breaks_a_promise_is_found(
    mutate: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Failed, match=complaint):
        deque(map(history, range(100)), maxlen=0)
