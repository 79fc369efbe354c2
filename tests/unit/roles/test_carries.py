"""Every environment has a memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from dreamfleet.roles.carries import Carries


class Counting:
    def init_policy(self, n: int) -> Any:
        return {"count": np.zeros(n, np.int64)}


def step(carries: Carries, ids: list[int], first: list[bool] | None = None) -> list[int]:
    """Count one more for these environments, and return what they had before."""
    firsts = np.array(first or [False] * len(ids))
    carry, slots = carries.take(np.array(ids), firsts)
    carries.put(slots, {"count": carry["count"] + 1})
    return carry["count"].tolist()


def test_carries_follow_their_environment_in_any_batch() -> None:
    carries = Carries(Counting(), 4)
    assert step(carries, [7, 3]) == [0, 0]
    assert step(carries, [3]) == [1]
    assert step(carries, [5, 3, 7]) == [0, 2, 1]
    assert len(carries) == 3


def test_an_episode_begins_with_a_fresh_carry() -> None:
    carries = Carries(Counting(), 4)
    step(carries, [1, 2])
    step(carries, [1, 2])
    assert step(carries, [2, 1], [True, False]) == [0, 2]


def test_more_environments_than_expected_find_room() -> None:
    carries = Carries(Counting(), 2)
    step(carries, [0, 1])
    assert step(carries, [4, 0, 3, 1, 2]) == [0, 1, 0, 1, 0]
    assert step(carries, [0, 1, 2, 3, 4]) == [2, 2, 1, 1, 1]


def test_silent_environments_are_forgotten_and_leave_nothing_behind() -> None:
    now = [0.0]
    carries = Carries(Counting(), 2, clock=lambda: now[0])
    step(carries, [0, 1])
    now[0] = 10.0
    step(carries, [1])
    assert carries.evict(5.0) == 1
    assert len(carries) == 1
    assert step(carries, [8, 1]) == [0, 2]
