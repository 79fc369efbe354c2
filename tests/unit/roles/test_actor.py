"""The actor: what is replied to a batch, and what is passed on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import CountingAgent, small_run

from dreamfleet.agents import AgentBase
from dreamfleet.roles.actor import Actor, Transitions, VideoFrames, serve_actor
from dreamfleet.roles.policy_batches import Carries, padded_policy, policy_sizes
from dreamfleet.roles.progress import Progress
from dreamfleet.transport import BatchServer
from dreamfleet.transport.errors import Closed, Timeout


class Replied:
    """A future whose reply is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Recorder:
    """A client that records its calls, and always gets the same reply."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer = answer

    def memory(self, size: int) -> None:
        """There is none to share."""

    def call(self, *call: Any) -> Replied:
        self.calls.append(call)
        return Replied(self.answer)

    def __getattr__(self, method: str) -> Any:
        return partial(self.call, method)

    def stats(self) -> dict[str, float]:
        return {"connected": 1.0}


class Summing(AgentBase):
    """An agent whose actions depend on everything it has seen of an environment, and on nothing
    else; keeps the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.sizes: list[int] = []

    def init_policy(self, n: int) -> Any:
        return {"sum": np.zeros(n)}

    def policy(self, carry: Any, obs: Mapping[str, Any], mode: str = "train") -> Any:
        self.sizes.append(len(obs["value"]))
        total = 0.5 * carry["sum"] + obs["value"]
        actions = {"action": np.sin(total).astype(np.float32)}
        return {"sum": total}, actions, {"mode": np.full(len(total), len(mode))}


def make_actor(agent: Any, tmp_path: Path, **changes: Any) -> tuple[Actor, Recorder, Recorder]:
    config = small_run(tmp_path, **{"envs": 6, "actor_batch": 5, **changes})
    replay, logger = Recorder(0), Recorder(False)
    return Actor(agent, config, Progress(), replay, logger), replay, logger


def step(actor: Actor, obs: dict[str, Any]) -> dict[str, Any]:
    """The actions for a batch, whose transitions are sent right away."""
    actions, transitions = actor.act(obs)
    actor.send([transitions])
    return actions


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
    together, _, _ = make_actor(Summing(), tmp_path)
    alone, _, _ = make_actor(Summing(), tmp_path)
    sums = np.zeros(5)
    for row in values:
        batch = rng.permutation(5)[: rng.integers(1, 6)]
        actions = step(together, observations(batch.tolist(), row[batch]))
        one_by_one = [step(alone, observations([n], [row[n]]))["action"] for n in batch]
        assert actions["action"].tolist() == np.concatenate(one_by_one).tolist()
        sums[batch] = 0.5 * sums[batch] + row[batch]  # and both remember each environment
        np.testing.assert_allclose(actions["action"], np.sin(sums[batch]), rtol=1e-6)


def test_training_and_evaluation_rows_of_a_batch_get_their_own_mode_in_place(
    tmp_path: Path,
) -> None:
    agent, replay, _ = make_actor(Summing(), tmp_path)
    alone, _, _ = make_actor(Summing(), tmp_path)
    ids, is_eval = [4, 0, 5, 1, 2], [True, False, True, False, False]
    for value in (0.1, 0.7):
        first = value == 0.1
        values = [value + n for n in ids]
        actions = step(agent, observations(ids, values, is_eval=is_eval, is_first=first))
        expected = [
            step(alone, observations([n], [v], is_eval=[e], is_first=first))["action"][0]
            for n, v, e in zip(ids, values, is_eval, strict=True)
        ]
        assert actions["action"].tolist() == expected
    agent.take_replies(wait=True)
    modes = {(evaluated, *steps["mode"]) for _, steps, _, evaluated, *_ in replay.calls}
    assert modes == {(True, 4, 4), (False, 5, 5, 5)}  # the length of the mode's name


def test_batches_come_in_a_few_sizes_whatever_arrives(tmp_path: Path) -> None:
    agent = Summing()
    actor, replay, _ = make_actor(agent, tmp_path)
    for size in range(1, 7):
        first = [envid == size - 1 for envid in range(size)]
        actions = step(actor, observations(list(range(size)), [1.0] * size, is_first=first))
        assert len(actions["action"]) == size
    actor.take_replies(wait=True)
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
    actor, replay, logger = make_actor(Summing(), tmp_path)
    for value in (1.0, 3.0):
        first = value == 1.0
        values = [value, value + 1]
        step(actor, observations([0, 5], values, is_eval=[False, True], is_first=first))
    actor.take_replies(wait=True)
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
        actor = Actor(Summing(), config, progress, Recorder(0), Recorder(reached))
        step(actor, observations([0], [0.0], is_first=True))
        actor.take_replies(wait=True)
        assert progress.finished.is_set() == reached
        assert progress.error is None


class Holding(Recorder):
    """A replay with steps of several actors."""

    steps = 7

    def position(self) -> Replied:
        return Replied({"steps": self.steps})


def test_of_several_actors_the_replay_counts_the_steps(tmp_path: Path) -> None:
    config, progress, replay = small_run(tmp_path, envs=6, actors=2), Progress(20), Holding()
    actor = Actor(Summing(), config, progress, replay, Recorder(False))  # type: ignore[arg-type]
    for steps in (7, 19):
        replay.steps = steps
        step(actor, observations([0, 2], [1.0, 1.0], is_first=True))
        assert progress.step == steps
    assert not progress.finished.is_set()
    replay.steps = 20
    step(actor, observations([0, 2], [1.0, 1.0]))
    assert progress.finished.is_set()


class Away:
    """A replay that does not answer before its client is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def memory(self, size: int) -> None:
        """There is none to share."""

    def add_batch(self, *call: Any) -> Any:
        return self

    def done(self) -> bool:
        return False

    def result(self) -> Any:
        assert self.closed.wait(60)
        raise Closed("The client was closed.")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_that_is_stopped_drops_unconfirmed_steps_and_another_one_fails(
    tmp_path: Path, stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    progress, replay = Progress(), Away()
    actor = Actor(Summing(), small_run(tmp_path), progress, replay, Recorder(False))  # type: ignore[arg-type]
    step(actor, observations([0], [0.0], is_first=True))
    (progress.stop if stopped else progress.finish)()
    replay.closed.set()
    with pytest.raises(Closed) as raised:
        actor.take_replies(wait=True)
    actor.on_send_error(raised.value)
    assert ("unconfirmed steps are dropped" in caplog.text) == stopped
    assert progress.error is (None if stopped else raised.value)
    actor.on_send_error(error := ValueError())
    assert progress.error is (error if stopped else raised.value), "this is no end in order"


def test_rows_that_are_not_passed_on_in_time_do_not_fail_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = BatchServer.close

    def late(self: BatchServer, flush: float) -> None:
        close(self, flush=0.0)
        raise Timeout("32 rows are dropped.")

    monkeypatch.setattr(BatchServer, "close", late)
    monkeypatch.setattr(Actor, "log_metrics", lambda *_, **__: None)
    progress = Progress()
    progress.stop()
    serve_actor(Summing(), small_run(tmp_path, on_failure="restart"), progress)
    assert progress.error is None


def begin(ids: list[int], is_first: list[bool]) -> dict[str, Any]:
    return observations(ids, [0.0] * len(ids), is_first=is_first)


def test_an_episode_whose_start_was_missed_is_reset_and_not_stored(
    tmp_path: Path,
) -> None:
    actor, replay, logger = make_actor(CountingAgent(), tmp_path)
    # As after a restart of the agent: environment 1 is in the middle of an episode.
    reply = step(actor, begin([0, 1], [True, False]))
    assert reply["reset"].tolist() == [False, True]
    reply = step(actor, begin([0, 1], [False, True]))
    assert reply["reset"].tolist() == [False, False]
    assert reply["action"].tolist() == [1, 0]
    actor.take_replies(wait=True)
    for calls in (replay.calls, logger.calls):
        assert [envid for call in calls for envid in call[2].tolist()] == [0, 0, 1]
    assert logger.calls[-1][1] == 3


def test_a_batch_of_which_nothing_is_kept_sends_nothing(tmp_path: Path) -> None:
    actor, replay, logger = make_actor(CountingAgent(), tmp_path)
    reply = step(actor, begin([3], [False]))
    assert reply["reset"].tolist() == [True]
    actor.take_replies(wait=True)
    assert replay.calls == logger.calls == []


# --- what is sent --------------------------------------------------------------------------------


def transitions(
    ids: list[int], values: list[int], *, is_eval: bool = False, first: bool = False
) -> list[Transitions]:
    size = len(ids)
    steps = {
        "value": np.array(values),
        "is_first": np.full(size, first),
        "image": np.zeros((size, 2, 2, 3), np.uint8),
    }
    flags = {key: np.zeros(size, bool) for key in ("is_last", "is_terminal")}
    logs = {"reward": np.array(values, float), "is_first": steps["is_first"], **flags}
    return [Transitions(np.array(ids), is_eval, steps, logs)]


def stored(replay: Recorder) -> list[tuple[list[int], list[int], bool, int]]:
    return [(c[2].tolist(), c[1]["value"].tolist(), c[3], c[5]) for c in replay.calls]


def test_batches_that_come_together_share_a_message_in_order(tmp_path: Path) -> None:
    actor, replay, logger = make_actor(CountingAgent(), tmp_path, report_every=0.0)
    first, *others = transitions([9], [0]), transitions([0, 1], [10, 20]), transitions([1], [21])
    actor.send([first])
    actor.send([*others, transitions([0, 1], [11, 22])])
    assert stored(replay) == [
        ([9], [0], False, 1),
        ([0, 1, 1, 0, 1], [10, 20, 21, 11, 22], False, 2),
    ]
    assert [call[2].tolist() for call in logger.calls] == [[9], [0, 1, 1, 0, 1]]


def test_environments_may_log_different_keys(tmp_path: Path) -> None:
    """A step that lacks a number has -inf there, which no statistic counts."""
    actor, _, logger = make_actor(CountingAgent(), tmp_path, report_every=0.0)
    batches = [transitions([envid], [1]) for envid in range(3)]
    one, two, three = (batch for [batch] in batches)
    one.logs["log/one"] = np.array([5], np.int32)
    two.logs["log/two"] = np.array([6.0], np.float32)
    three.logs["log/one"] = np.array([[1.0, 2.0]], np.float32)
    actor.send(batches)
    logs = logger.calls[0][4]
    assert logs["log/one"].tolist() == [5, -np.inf, -np.inf]
    assert logs["log/two"].tolist() == [-np.inf, 6, -np.inf]
    assert logs["reward"].tolist() == [1, 1, 1]


def test_training_and_evaluation_go_to_their_own_buffers(tmp_path: Path) -> None:
    actor, replay, _ = make_actor(CountingAgent(), tmp_path, report_every=0.0)
    both = [*transitions([0], [2]), *transitions([7], [3], is_eval=True)]
    actor.send([both, transitions([7], [4], is_eval=True)])
    assert stored(replay) == [([0], [2], False, 1), ([7, 7], [3, 4], True, 2)]


def test_frames_of_a_video_go_with_the_batches_of_its_episode(tmp_path: Path) -> None:
    actor, _, logger = make_actor(CountingAgent(), tmp_path, report_every=3600.0)
    started = transitions([0, 1], [1, 1], first=True)
    actor.send([transitions([0, 2], [0, 0]), started, transitions([3, 1], [3, 3])])
    actor.send([transitions([0, 2], [2, 2])])
    actor.send([transitions([1, 2], [3, 3])])
    # The next video is due in an hour.
    actor.send([transitions([0, 1], [4, 4]), transitions([0, 1], [4, 4], first=True)])
    actor.send([transitions([0, 1], [5, 5])])
    sent = [(call[2].tolist(), len(call[5].get("image", ()))) for call in logger.calls]
    expected = [([0, 2, 0, 1, 3, 1], 2), ([0, 2], 1), ([1, 2], 0), ([0, 1, 0, 1], 2), ([0, 1], 0)]
    assert sent == expected


def frames(video: VideoFrames, ids: list[int], *, first: bool) -> list[int]:
    obs = {
        "image": np.repeat(np.array(ids, np.uint8) + 100, 48).reshape(-1, 4, 4, 3),
        "vector": np.zeros((len(ids), 3)),
        "tokens": np.zeros((len(ids), 2, 2, 7), np.uint8),
        "is_first": np.full(len(ids), first),
    }
    sent = video.frames(np.array(ids), obs)
    assert set(sent) <= {"image"}
    return sent["image"][:, 0, 0, 0].tolist() if sent else []


def test_a_video_starts_with_an_episode_and_holds_one_environment_only() -> None:
    video = VideoFrames(3600.0)
    assert frames(video, [2, 0], first=False) == []  # its start was missed
    assert frames(video, [1, 0, 2], first=True) == [100]
    assert frames(video, [1, 2], first=False) == []
    assert frames(video, [0], first=False) == [100]
    assert frames(video, [0], first=True) == [100]  # with the end of the episode before, if any
    assert frames(video, [0], first=False) == []  # the next video is due in an hour


def test_no_video_is_recorded_where_reports_are_off() -> None:
    assert frames(VideoFrames(0.0), [0], first=True) == []


# --- carries -------------------------------------------------------------------------------------


class Counting(AgentBase):
    def __init__(self) -> None:
        super().__init__({}, {})

    def init_policy(self, n: int) -> Any:
        return {"count": np.zeros(n, np.int64)}


def count(carries: Carries, ids: list[int], first: list[bool] | None = None) -> list[int]:
    """Count one more for these environments, and return what they had before."""
    firsts = np.array(first or [False] * len(ids))
    carry, slots, _ = carries.take(np.array(ids), firsts)
    carries.put(slots, {"count": carry["count"] + 1})
    return carry["count"].tolist()


def test_carries_follow_their_environment_in_any_batch() -> None:
    carries = Carries(Counting(), 4)
    assert count(carries, [7, 3]) == [0, 0]
    assert count(carries, [3]) == [1]
    assert count(carries, [5, 3, 7]) == [0, 2, 1]
    assert len(carries.table.idle()) == 3


def test_an_episode_starts_with_an_initial_carry() -> None:
    carries = Carries(Counting(), 4)
    count(carries, [1, 2])
    count(carries, [1, 2])
    assert count(carries, [2, 1], [True, False]) == [0, 2]


def test_more_environments_than_expected_find_room() -> None:
    carries = Carries(Counting(), 2)
    count(carries, [0, 1])
    assert count(carries, [4, 0, 3, 1, 2]) == [0, 1, 0, 1, 0]
    assert count(carries, [0, 1, 2, 3, 4]) == [2, 2, 1, 1, 1]


def test_environments_that_are_gone_leave_nothing_behind() -> None:
    carries = Carries(Counting(), 2)
    count(carries, [0, 1])
    count(carries, [1])
    carries.table.remove([0, 7])
    assert len(carries.table.idle()) == 1
    assert count(carries, [8, 1]) == [0, 2]


class Serving:
    """Stands for the actor's server."""

    def stats(self) -> dict[str, float]:
        return dict.fromkeys(
            (f"act/{key}" for key in ("items", "batches", "fill", "work", "wait")), 0.0
        ) | {"act/waiting": 0.0}


class Watching(Recorder):
    """A client of the logger, with all that metrics ask of it."""

    behind = False

    def wait_any(self, futures: Any, timeout: float) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        return {"connected": 1.0, "inflight": 0.0}


def test_an_episode_goes_on_however_long_it_was_held_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the limiter, a replay that restarts, a slow learner, or a step that takes that long. It is
    dropped, and this is said, if the connection has ended as well."""
    now, connected = [0.0], {1, 2}
    config = small_run(tmp_path, envs=6, actor_batch=5, episode_timeout=180.0)
    replay, logger = Watching(0), Watching(False)
    clients: Any = (replay, logger)
    actor = Actor(Summing(), config, Progress(), *clients)
    actor._carries.table._clock = lambda: now[0]
    actor.gone = lambda ids: [each for each in ids if each not in connected]
    step(actor, observations([1, 2], [0.1, 0.2], is_first=True))
    now[0] = 1000.0
    actor.log_metrics(Serving())  # type: ignore[arg-type]
    assert not step(actor, observations([1, 2], [0.1, 0.2]))["reset"].any()
    assert [len(call[2]) for call in replay.calls] == [2, 2]
    assert caplog.messages == []
    connected.remove(2)
    now[0] = 2000.0
    actor.log_metrics(Serving())  # type: ignore[arg-type]
    assert step(actor, observations([1, 2], [0.1, 0.2]))["reset"].tolist() == [False, True]
    assert replay.calls[-1][2].tolist() == [1]
    (warning,) = caplog.messages
    assert warning.startswith("environment 2: no connection")
    assert "1000 s" in warning
    assert "episode_timeout" in warning
    gone = [call for call in logger.calls if call[0] == "gone"]
    assert [call[1].tolist() for call in gone] == [[2]]
