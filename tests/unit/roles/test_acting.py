"""The actor's half of a batch: what is answered, and what is passed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import CountingAgent, small_run

from dreamfleet.roles.actor import Acting
from dreamfleet.roles.padding import padded_policy, policy_sizes
from dreamfleet.roles.progress import Progress


class Answered:
    """A future whose answer is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Recorder:
    """A client that keeps what it is asked, and answers always the same."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer = answer

    def call(self, *call: Any) -> Answered:
        self.calls.append(call)
        return Answered(self.answer)

    def stats(self) -> dict[str, float]:
        return {"connected": 1.0}


class Summing:
    """An agent whose actions depend on everything it has seen of an environment, and on nothing
    else; keeps the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def init_policy(self, n: int) -> Any:
        return {"sum": np.zeros(n)}

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        self.sizes.append(len(obs["value"]))
        total = 0.5 * carry["sum"] + obs["value"]
        actions = {"action": np.sin(total).astype(np.float32)}
        return {"sum": total}, actions, {"mode": np.full(len(total), len(mode))}


def acting(agent: Any, tmp_path: Path, **changes: Any) -> tuple[Acting, Recorder, Recorder]:
    config = small_run(tmp_path, **{"envs": 6, "actor_batch": 5, **changes})
    replay, logger = Recorder(0), Recorder(False)
    return Acting(agent, config, Progress(), replay, logger), replay, logger


def observations(
    ids: list[int], values: Any, *, is_eval: Any = False, is_first: Any = False
) -> dict[str, Any]:
    size = len(ids)
    return {
        "envid": np.array(ids, np.int64),
        "is_eval": np.broadcast_to(np.asarray(is_eval), size).copy(),
        "value": np.asarray(values, np.float64),
        "image": np.repeat(np.array(ids, np.uint8), 48).reshape(size, 4, 4, 3),
        "reward": np.zeros(size, np.float32),
        "is_first": np.broadcast_to(np.asarray(is_first), size).copy(),
        "is_last": np.zeros(size, bool),
        "is_terminal": np.zeros(size, bool),
        "log/speed": np.ones(size, np.float32),
    }


def test_actions_in_a_batch_equal_actions_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 5))
    together, _, _ = acting(Summing(), tmp_path)
    alone, _, _ = acting(Summing(), tmp_path)
    sums = np.zeros(5)
    for row in values:
        batch = rng.permutation(5)[: rng.integers(1, 6)]
        actions, _ = together.work(observations(batch.tolist(), row[batch]))
        one_by_one = [alone.work(observations([n], [row[n]]))[0]["action"] for n in batch]
        assert actions["action"].tolist() == np.concatenate(one_by_one).tolist()
        sums[batch] = 0.5 * sums[batch] + row[batch]  # and both remember each environment
        np.testing.assert_allclose(actions["action"], np.sin(sums[batch]), rtol=1e-6)


def test_training_and_evaluation_rows_of_a_batch_get_their_own_mode_in_place(
    tmp_path: Path,
) -> None:
    agent, replay, _ = acting(Summing(), tmp_path)
    alone, _, _ = acting(Summing(), tmp_path)
    ids, is_eval = [4, 0, 5, 1, 2], [True, False, True, False, False]
    for value in (0.1, 0.7):
        first = value == 0.1
        values = [value + n for n in ids]
        actions, _ = agent.work(observations(ids, values, is_eval=is_eval, is_first=first))
        expected = [
            alone.work(observations([n], [v], is_eval=[e], is_first=first))[0]["action"][0]
            for n, v, e in zip(ids, values, is_eval, strict=True)
        ]
        assert actions["action"].tolist() == expected
    agent.hand_over()
    for _, steps, _, evaluated, _, _ in replay.calls:
        assert set(steps["mode"]) == {len("eval" if evaluated else "train")}


def test_batches_come_in_a_few_sizes_whatever_arrives(tmp_path: Path) -> None:
    agent = Summing()
    actor, replay, _ = acting(agent, tmp_path)
    for size in range(1, 7):
        first = [envid == size - 1 for envid in range(size)]
        actions, _ = actor.work(observations(list(range(size)), [1.0] * size, is_first=first))
        assert len(actions["action"]) == size
    actor.hand_over()
    assert agent.sizes == [1, 2, 4, 4, 5, 6]
    for call in replay.calls:
        assert {len(column) for column in call[1].values()} == {len(call[2])}
    assert sum(len(call[2]) for call in replay.calls) == sum(range(1, 7))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"envs": 8, "actor_batch": 0, "envs_per_process": 1}, (1, 2, 4)),
        ({"envs": 8, "actor_batch": 8, "envs_per_process": 8}, (1, 2, 4, 8)),
        ({"envs": 12, "actor_batch": 6, "envs_per_process": 12}, (1, 2, 4, 6, 8, 12)),
        ({"envs": 1, "actor_batch": 0, "envs_per_process": 4}, (1,)),
    ],
)
def test_full_batches_and_whole_processes_are_never_padded(
    tmp_path: Path, settings: dict[str, int], sizes: tuple[int, ...]
) -> None:
    assert policy_sizes(small_run(tmp_path, **settings)) == sizes


def test_what_is_added_to_a_batch_is_dropped_again() -> None:
    carry = {"nested": {"count": np.array([3, 8, 1])}}
    obs = {"is_first": np.zeros(3, bool)}
    carry, actions, outs = padded_policy(CountingAgent(), (1, 2, 4), carry, obs, "train")
    assert carry["nested"]["count"].tolist() == [4, 9, 2]
    assert actions["action"].tolist() == [3, 3, 1]
    assert outs["updates"].shape == (3,)


def test_transitions_are_numbered_and_split_between_training_and_evaluation(
    tmp_path: Path,
) -> None:
    actor, replay, logger = acting(Summing(), tmp_path)
    for value in (1.0, 3.0):
        first = value == 1.0
        values = [value, value + 1]
        actor.work(observations([0, 5], values, is_eval=[False, True], is_first=first))
    actor.hand_over()
    assert [call[5] for call in replay.calls] == list(range(1, len(replay.calls) + 1))
    assert len({call[4] for call in replay.calls}) == 1
    for envid, is_eval, values in ((0, False, [1.0, 3.0]), (5, True, [2.0, 4.0])):
        mine = [call for call in replay.calls if call[3] == is_eval]
        assert [n for call in mine for n in call[2]] == [envid, envid]
        assert [value for call in mine for value in call[1]["value"]] == values
    assert not any("log/speed" in call[1] for call in replay.calls)
    assert logger.calls[-1][1] == 2  # training steps; those of evaluation do not count
    assert not any("image" in call[4] for call in logger.calls)
    assert [v for call in logger.calls for v in call[4]["log/speed"]] == [1.0] * 4


def test_the_run_finishes_when_the_logger_says_that_the_target_is_reached(tmp_path: Path) -> None:
    for reached in (False, True):
        config = small_run(tmp_path, target_score=1.0)
        progress = Progress()
        actor = Acting(Summing(), config, progress, Recorder(0), Recorder(reached))
        actor.work(observations([0], [0.0], is_first=True))
        actor.hand_over()
        assert progress.finished.is_set() == reached
        assert progress.error is None


def begin(ids: list[int], is_first: list[bool]) -> dict[str, Any]:
    return observations(ids, [0.0] * len(ids), is_first=is_first)


def test_an_episode_whose_beginning_was_missed_is_begun_anew_and_not_stored(
    tmp_path: Path,
) -> None:
    actor, replay, logger = acting(CountingAgent(), tmp_path)
    # As after a restart of the agent: environment 1 is in the middle of an episode.
    answer, _ = actor.work(begin([0, 1], [True, False]))
    assert answer["reset"].tolist() == [False, True]
    answer, _ = actor.work(begin([0, 1], [False, True]))
    assert answer["reset"].tolist() == [False, False]
    assert answer["action"].tolist() == [1, 0]
    actor.hand_over()
    for calls in (replay.calls, logger.calls):
        assert [envid for call in calls for envid in call[2].tolist()] == [0, 0, 1]
    assert logger.calls[-1][1] == 3


def test_a_batch_of_which_nothing_is_kept_sends_nothing(tmp_path: Path) -> None:
    actor, replay, logger = acting(CountingAgent(), tmp_path)
    answer, _ = actor.work(begin([3], [False]))
    assert answer["reset"].tolist() == [True]
    actor.hand_over()
    assert replay.calls == logger.calls == []
