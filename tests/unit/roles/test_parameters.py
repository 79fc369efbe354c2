"""Actors in processes of their own: they get the learner's parameters, and count with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import CountingAgent, small_run

from dreamfleet.config import RunConfig
from dreamfleet.fleet.nodes import addresses
from dreamfleet.roles.actor import waits_for
from dreamfleet.roles.addresses import find_server
from dreamfleet.roles.health import Health
from dreamfleet.roles.policy_batches import policy_sizes
from dreamfleet.roles.progress import Progress
from dreamfleet.roles.scaling import parameters as module
from dreamfleet.roles.scaling.parameters import ParameterServer, packed, unpacked
from dreamfleet.roles.scaling.remote_actor import Follower, RemoteProgress
from dreamfleet.transport import Client
from dreamfleet.transport.codec import encode


class Learner:
    """The learner's side, as the agent's process has it."""

    def __init__(self, args: RunConfig, stored: int = 0) -> None:
        self.agent, self.progress, self.updates = CountingAgent(), Progress(args.steps), 0
        self.progress.restore(stored)
        self.server = ParameterServer(self.agent, args, self.progress, lambda: self.updates)

    def train(self, updates: int) -> None:
        self.updates = self.agent._updates = updates
        self.server.publish()


def until(condition: Callable[[], bool], learner: Learner | None = None) -> None:
    """Wait, while the learner goes on training, which is when it offers parameters."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        if learner:
            learner.server.publish()
        time.sleep(0.005)


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """Two actors."""
    return small_run(tmp_path, envs=4, actors=2, actor_batch=2, steps=1000, batch_size=5)


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


def client_of(run: RunConfig, stack: ExitStack) -> Client:
    return stack.enter_context(Client(find_server(run, "learner"), "actor-1-learner"))


def test_parameters_of_updates_reach_an_actor(
    run: RunConfig, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr("dreamfleet.roles.scaling.remote_actor._EVERY_SECONDS", 0.01)
    monkeypatch.setattr(module, "_SHARE", 0)
    client = client_of(run, stack)
    progress, agent = RemoteProgress("actor-1", run, client), CountingAgent()
    follower = Follower(agent, progress, Health())
    with follower:
        assert not follower._loaded.is_set(), "there is no learner yet"
        learner = Learner(run)
        with learner.server:
            assert follower.wait()
            versions = [int(follower.metrics()["policy/version"])]
            for updates in (3, 8):
                learner.train(updates)
                until(lambda: agent._updates == updates, learner)  # noqa: B023 - called here
                until(lambda: not follower.metrics()["policy/updates_behind"])
                versions.append(int(follower.metrics()["policy/version"]))
            assert versions == [1, 2, 3]
            assert 0 <= follower.metrics()["policy/seconds_behind"] < 600
            progress.policy_lock.acquire()  # while the agent acts, its parameters stay as they are
            learner.train(9)
            until(lambda: progress.heard["version"] == 4, learner)
            assert agent._updates == 8
            progress.policy_lock.release()
        # A successor that went back to a checkpoint is followed as well.
        successor = Learner(run)
        successor.updates = successor.agent._updates = 5
        with successor.server:
            until(lambda: agent._updates == 5)
            progress.stop()


def test_only_new_parameters_are_taken_and_not_too_often(run: RunConfig) -> None:
    learner = Learner(run)
    with learner.server as server:
        first = server.parameters()
        server.publish()
        learner.train(1)
        assert server.parameters()["version"] == first["version"] == 1  # within a second


def test_an_actor_waits_for_the_learner_unless_it_is_asked_to_stop(
    run: RunConfig, stack: ExitStack
) -> None:
    client = client_of(run, stack)
    actor = RemoteProgress("actor-1", run, client)
    waits = threading.Thread(target=actor.report)
    waits.start()
    with Learner(run).server as server:
        waits.join(120)
        assert not waits.is_alive()
        assert server.busy()
        actor.busy = False
        actor.report()
        assert not server.busy()
    alone = RemoteProgress("actor-1", run, client)
    waits = threading.Thread(target=alone.report)
    waits.start()
    alone.stop()
    waits.join(30)
    assert not waits.is_alive(), "it does not wait for the client's patience"


def test_the_end_of_the_run_reaches_every_actor(run: RunConfig, stack: ExitStack) -> None:
    client = client_of(run, stack)
    learner = Learner(run, stored=900)
    with learner.server:
        actor, another = (RemoteProgress("actor-1", run, client) for _ in range(2))
        actor.raise_to(999)
        actor.report()
        assert not actor.finished.is_set()
        assert not actor.over()
        actor.raise_to(1000)
        assert actor.finished.is_set()
        assert actor.over(), "it knows before the learner does"
        learner.progress.raise_to(1000)
        another.report()
        assert another.finished.is_set()
        assert another.over()
        assert not another.stopped


def test_a_stop_a_score_and_a_failure_are_told_apart(run: RunConfig, stack: ExitStack) -> None:
    client = client_of(run, stack)
    asked = Learner(run)
    with asked.server:
        asked.progress.stop()
        actor = RemoteProgress("actor-1", run, client)
        actor.report()
        assert actor.stopped
        assert actor.finished.is_set()
    scored = Learner(small_run(run.logdir, envs=4, actors=2, target_score=1.0))
    with scored.server:
        actor = RemoteProgress("actor-1", run, client)
        actor.finish()  # the logger told this actor first
        assert scored.progress.finished.is_set()
        assert actor.finished.is_set()
        assert not actor.stopped
    failed = Learner(run)
    with failed.server:
        failed.progress.fail(RuntimeError("the training is broken"))
        actor = RemoteProgress("actor-1", run, client)
        actor.report()
        assert not actor.finished.is_set(), "it waits for the next learner"


def test_arrays_that_are_too_large_for_a_frame_travel_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 5000)
    large = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    state = {"large": large, "small": np.ones(2), "count": 3, "name": "x", "flag": True}
    message = packed(state)
    assert max(len(frame) for frame in encode(message).frames) <= 5000
    found = unpacked(message)
    assert {k: v for k, v in found.items() if k in ("count", "name", "flag")} == {
        "count": 3, "name": "x", "flag": True
    }  # fmt: skip
    assert found["large"].dtype == np.float32
    np.testing.assert_array_equal(found["large"], large)
    np.testing.assert_array_equal(found["small"], state["small"])


def test_machines_that_join_hear_of_every_actor(tmp_path: Path) -> None:
    run = small_run(tmp_path, actors=3, bind="127.0.0.1", actor_addr="tcp://127.0.0.1:5551")
    assert addresses(run, "127.0.0.1") == {
        "actor": "tcp://*:5551", "actor-1": "tcp://*:5552", "actor-2": "tcp://*:5553"
    }  # fmt: skip


def test_a_run_begins_when_all_actors_together_have_what_it_expects(
    run: RunConfig, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, expected = Learner(run), 6
    with learner.server:
        actor = RemoteProgress("actor-1", run, client_of(run, stack))
        assert not actor.may_begin(3, expected)
        actor.report()
        assert not learner.progress.may_begin(2, expected)  # 5 are there
        assert learner.progress.present == 5
        assert not actor.may_begin(4, expected)  # one more, which it has not told yet
        monkeypatch.setattr(module, "_LOST_SECONDS", 0.0)
        assert not learner.progress.may_begin(3, expected)  # an actor that is lost has none
        assert learner.progress.present == 3
        monkeypatch.undo()
        actor.report()
        assert learner.progress.may_begin(2, expected)
        actor.report()
        assert actor.may_begin(4, expected)
        learner.progress.present_elsewhere = lambda: 0
        assert learner.progress.may_begin(0, expected)  # what has begun goes on


def test_each_actor_has_its_share_of_the_environments(tmp_path: Path) -> None:
    run = small_run(tmp_path, envs=5, actors=2, actor_batch=8, envs_per_process=8, log_every=1)
    assert [list(run.envs_of(actor)) for actor in range(2)] == [[0, 2, 4], [1, 3]]
    assert [run.policy_batch_of(actor) for actor in range(2)] == [3, 2], "a batch can be full"
    assert [policy_sizes(run, actor) for actor in range(2)] == [(1, 2, 3), (1, 2)]
    free = {"connected": 1.0, "inflight": 0.0}
    assert waits_for(run, {1: 0.5, 3: 0.5}, 0, free, 1) == ""
    assert waits_for(run, {1: 0.5}, 0, free, 1) == "no observation from environment 3 yet"
    assert waits_for(run, {}, 0, {**free, "inflight": 2.0}, 1).startswith("actor-1 waits for")
