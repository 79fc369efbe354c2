"""Masks of actions: what fits an action, what a mask allows, and the random agent."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from dreamfleet import Space
from dreamfleet.agents import RandomAgent, SpaceError, find_agent
from dreamfleet.envs.base import RESERVED
from dreamfleet.masks import ActionMask

ONE = {"action": Space(np.int32, (), 1, 5), "reset": Space(bool)}
UNEVEN = {"keys": Space(np.int32, (3,), 0, [2, 4, 1]), "reset": Space(bool)}
TWO = {"a": Space(np.int32, (), 0, 2), "b": Space(np.int32, (), 0, 2), "reset": Space(bool)}
FLOAT = {"force": Space(np.float32, (2,), -1, 1), "reset": Space(bool)}


def spaces(mask: Space) -> dict[str, Space]:
    return {"action_mask": mask, **RESERVED}


def mask_of(mask: Space, act_space: dict[str, Space]) -> ActionMask:
    found = ActionMask.of(spaces(mask), act_space)
    assert found is not None
    return found


def test_a_task_without_the_key_has_no_mask() -> None:
    assert ActionMask.of(dict(RESERVED), ONE) is None
    assert ActionMask.of({"mask": Space(bool, (4,)), **RESERVED}, TWO) is None


@pytest.mark.parametrize(
    "mask",
    [
        Space(bool, (4,)),
        Space(np.int8, (4,), 0, 2),
        Space(np.uint8, (4,), 0, 2),
        Space(np.float32, (4,), 0, 1),
    ],
    ids=lambda space: space.dtype.name,
)
def test_masks_of_zeros_and_ones_are_taken(mask: Space) -> None:
    given = np.array([[1, 0, 0, 1], [0, 0, 1, 0]]).astype(mask.dtype)
    found = mask_of(mask, ONE)
    np.testing.assert_array_equal(found.allowed(given), given == 1)
    assert found.allows(given[0], np.int32(1))
    assert not found.allows(given[0], np.int32(2))


@pytest.mark.parametrize(
    ("mask", "act_space", "message"),
    [
        (Space(bool, (4,)), TWO, r"holds a \(discrete\), b \(discrete\): make it one Discrete"),
        (Space(bool, (2,)), FLOAT, r"holds force \(float\)"),
        (Space(bool, (5,)), ONE, r"has shape \(5,\), and action 'action' has 4 choices"),
        (Space(bool, (2, 2)), ONE, r"give it the shape \(4,\)"),
        (Space(bool, (3,)), UNEVEN, r"action 'keys' has 7 choices"),
        (Space(np.uint8, (4,)), ONE, r"may hold only 0 and 1: declare it as Space\(bool, \(4,\)\)"),
        (Space(np.int32, (4,), -1, 2), ONE, "may hold only 0 and 1"),
        (Space(np.float32, (4,)), ONE, "may hold only 0 and 1"),
    ],
)
@pytest.mark.parametrize("agent", ["random", "dreamer"])
def test_a_mask_that_does_not_fit_is_refused(
    mask: Space, act_space: dict[str, Space], message: str, agent: str
) -> None:
    kind = find_agent(agent)
    with pytest.raises(SpaceError, match=message):
        kind.check(spaces(mask), act_space, kind.config())


def test_masks_of_several_elements_follow_one_another() -> None:
    found = mask_of(Space(bool, (7,)), UNEVEN)
    given = np.array([[1, 0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0, 0]], np.int8)
    expected = [
        [[1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]],
        # The second and the third element allow nothing, which allows all that they have.
        [[0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    ]
    np.testing.assert_array_equal(found.allowed(given), expected)
    np.testing.assert_array_equal(found.empty(given), [False, True])
    rng = np.random.default_rng(0)
    drawn = found.sample(rng, np.repeat(given, 200, axis=0)).reshape(2, 200, 3)
    sets = [[set(map(int, each)) for each in rows.T] for rows in drawn]
    assert sets == [[{0}, {1, 2}, {0}], [{1}, {0, 1, 2, 3}, {0}]]
    assert drawn.dtype == np.int32


def observations(mask: Any, **changes: Any) -> dict[str, Any]:
    count = len(mask)
    flags = {key: np.zeros(count, bool) for key in ("is_first", "is_last", "is_terminal")}
    return {"action_mask": mask, "reward": np.zeros(count, np.float32), **flags, **changes}


def test_the_random_agent_draws_evenly_from_what_is_allowed() -> None:
    agent = RandomAgent(spaces(Space(bool, (4,))), ONE, seed=3)
    mask = np.tile(np.array([[False, True, False, True], [True, False, False, False]]), (2000, 1))
    for mode in ("train", "eval", "greedy"):
        _, actions, _ = agent.policy({}, observations(mask), mode)  # type: ignore[arg-type]
        drawn = actions["action"]
        assert drawn.dtype == np.int32
        np.testing.assert_array_equal(drawn[1::2], 1)
        assert set(drawn[::2].tolist()) == {2, 4}, "choices start at 1 here"
        assert 850 < (drawn[::2] == 2).sum() < 1150


def test_mask_that_forbids_all_allows_all_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    agent = RandomAgent(spaces(Space(bool, (4,))), ONE)
    nothing = np.zeros((400, 4), bool)
    ended = observations(nothing, is_last=np.ones(400, bool))
    agent.policy({}, ended)
    assert agent.metrics() == {"policy/empty_masks": 0}, "no action follows a last step"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _, actions, _ = agent.policy({}, observations(nothing))
    assert set(actions["action"].tolist()) == {1, 2, 3, 4}
    assert agent.metrics() == {"policy/empty_masks": 3}
    assert len(caplog.records) == 1, "it warns once"
    assert "forbids every action" in caplog.text
    assert RandomAgent(dict(RESERVED), ONE).metrics() == {}
