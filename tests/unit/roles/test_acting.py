"""An actor knows only episodes whose beginning it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fleet_parts import CountingAgent, small_run

from dreamfleet.roles.actor import Acting
from dreamfleet.roles.progress import Progress


class Recorder:
    """Stands in for a client, and keeps what is sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, *args: Any) -> Any:
        self.calls.append(args)
        return Answered()


class Answered:
    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> None:
        pass


def observations(envids: list[int], is_first: list[bool]) -> dict[str, Any]:
    count = len(envids)
    return {
        "envid": np.array(envids),
        "is_eval": np.zeros(count, bool),
        "reward": np.zeros(count, np.float32),
        "is_first": np.array(is_first),
        "is_last": np.zeros(count, bool),
        "is_terminal": np.zeros(count, bool),
    }


def test_an_episode_whose_beginning_was_missed_is_begun_anew_and_not_stored(
    tmp_path: Path,
) -> None:
    replay, logger, progress = Recorder(), Recorder(), Progress()
    acting = Acting(CountingAgent(), small_run(tmp_path), progress, replay, logger)
    # As after a restart of the agent: environment 1 is in the middle of an episode.
    answer, follows = acting.work(observations([0, 1], [True, False]))
    assert answer["reset"].tolist() == [False, True]
    acting.post(follows)
    assert [call[2].tolist() for call in replay.calls] == [[0]]
    assert [call[2].tolist() for call in logger.calls] == [[0]]
    assert progress.step == 1
    answer, follows = acting.work(observations([0, 1], [False, True]))
    assert answer["reset"].tolist() == [False, False]
    assert answer["action"].tolist() == [1, 0]
    acting.post(follows)
    assert replay.calls[-1][2].tolist() == [0, 1]


def test_a_batch_of_which_nothing_is_kept_sends_nothing(tmp_path: Path) -> None:
    replay, logger, progress = Recorder(), Recorder(), Progress()
    acting = Acting(CountingAgent(), small_run(tmp_path), progress, replay, logger)
    answer, follows = acting.work(observations([3], [False]))
    assert answer["reset"].tolist() == [True]
    acting.post(follows)
    assert replay.calls == logger.calls == []
    assert progress.step == 0
