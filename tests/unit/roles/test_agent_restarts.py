"""An agent that is started again acts at once, and one whose replay does not help it at the end is
saved all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_parts import CountingAgent, small_run

from dreamfleet.checkpoint import Checkpoint
from dreamfleet.config import RunConfig
from dreamfleet.errors import ConfigError
from dreamfleet.roles import agent as agent_role
from dreamfleet.roles import learner
from dreamfleet.roles.addresses import publish_address
from dreamfleet.roles.health import STARTED, health_path
from dreamfleet.roles.progress import Progress
from dreamfleet.transport import Server


class Servers:
    """A replay and a logger of which a method may hang until `go` is set."""

    def __init__(self, run: RunConfig, hangs: str) -> None:
        self.go, self.hanging = threading.Event(), threading.Event()
        self.finishes = 0
        batch = {"stepid": np.zeros((2, 4, 20), np.uint8), "is_first": np.zeros((2, 4), bool)}
        position = {"steps": 0, "samples": 0}
        methods: dict[str, dict[str, Any]] = {
            "replay": {
                "position": lambda: position,
                "raise_position": lambda steps: position,
                "permit": lambda known: known + run.host_batch,
                "sample_train": lambda: batch,
                "update": lambda data: 8,
                "finish": self._finish,
            },
            "logger": {"add": lambda *_: None, "status": dict},
        }
        self._stack = ExitStack()
        for role in ("replay", "logger"):
            server = Server("ipc://{auto}", role)
            for name, method in methods[role].items():
                function = self._hang if f"{role}.{name}" == hangs else method
                server.bind(name, function, workers=1, repeatable=True)
            self._stack.enter_context(server)
            publish_address(run, role, server.address)  # type: ignore[arg-type]

    def _finish(self, sequences: int) -> bool:
        self.finishes += 1
        return True

    def _hang(self, *args: Any) -> None:
        self.hanging.set()
        self.go.wait()

    def close(self) -> None:
        self.go.set()
        self._stack.close()


@pytest.fixture
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
    made = Servers(small_run(tmp_path, log_every=0.01), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("servers", ["replay.update"], indirect=True)
def test_an_agent_is_saved_although_the_replay_takes_nothing_any_more(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamfleet.roles.progress._END_SECONDS", 0.2)
    progress, run = Progress(), small_run(tmp_path, log_every=0.01)
    arguments = [CountingAgent(), threading.Barrier(1), run, progress]
    thread = threading.Thread(target=learner.parallel_learner, args=arguments, daemon=True)
    thread.start()
    assert servers.hanging.wait(120)
    progress.stop()
    thread.join(120)
    assert not thread.is_alive()
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot is not None
    assert snapshot.parts["agent"]["updates"] == snapshot.parts["run"]["updates"]


@pytest.mark.parametrize("servers", [""], indirect=True)
def test_a_replay_that_is_restarted_in_the_end_hears_of_it_again(
    tmp_path: Path, servers: Servers
) -> None:
    progress, run = Progress(), small_run(tmp_path, log_every=0.01)
    progress.senders.append(lambda: servers.finishes < 3)
    thread = threading.Thread(
        target=learner.parallel_learner,
        args=[CountingAgent(), threading.Barrier(1), run, progress],
        daemon=True,
    )
    thread.start()
    progress.finish()
    thread.join(120)
    assert not thread.is_alive()
    assert servers.finishes >= 3, "`finish` is repeated until all steps are confirmed"
    assert Checkpoint(tmp_path / "ckpt" / "agent").latest() is not None


class RaisesWhileWriting(CountingAgent):
    """Raises in its second update, while the checkpoint of the first is being written."""

    def __init__(self, writing: threading.Event, raised: threading.Event) -> None:
        super().__init__()
        self._writing, self._raised = writing, raised

    def train(self, carry: Any, batch: Mapping[str, Any]) -> Any:
        if self._updates == 1:
            assert self._writing.wait(120)
            self._raised.set()
            raise RuntimeError("the training is broken")
        return super().train(carry, batch)


@pytest.mark.parametrize("servers", [""], indirect=True)
def test_a_checkpoint_that_is_being_written_outlives_the_learner(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, raised, save = threading.Event(), threading.Event(), Checkpoint.save

    def slow(self: Checkpoint, *args: Any, **more: Any) -> Path:
        writing.set()
        assert raised.wait(120)
        return save(self, *args, **more)

    monkeypatch.setattr(Checkpoint, "save", slow)
    (tmp_path / "save.request").touch()
    agent = RaisesWhileWriting(writing, raised)
    with pytest.raises(RuntimeError, match="the training is broken"):
        learner.parallel_learner(agent, threading.Barrier(1), small_run(tmp_path), Progress())
    snapshot = Checkpoint(tmp_path / "ckpt" / "agent").load()
    assert snapshot is not None
    assert snapshot.parts["agent"]["updates"] == 1


@pytest.mark.parametrize("servers", [""], indirect=True)
def test_what_a_killed_agent_had_half_written_is_removed_by_the_next_one(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "ckpt" / "agent" / ".writing-000003"
    left.mkdir(parents=True)
    agent = CountingAgent()

    def compiled(**_: Any) -> None:
        raise ConfigError("it does not fit")

    monkeypatch.setattr(agent, "compile", compiled, raising=False)
    with pytest.raises(ConfigError, match="it does not fit"):
        learner.parallel_learner(agent, threading.Barrier(1), small_run(tmp_path), Progress())
    assert not left.exists()


class Left(BaseException):
    """The process has been left."""


def test_an_agent_that_is_stopped_while_it_compiles_sends_what_it_has_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, barrier = Progress(), threading.Barrier(2)
    acting, sent = threading.Event(), threading.Event()

    def leave(code: int) -> None:
        assert sent.is_set()
        assert progress.preparing.locked(), "the learner does not begin to save meanwhile"
        raise Left

    def acts(*_: Any) -> None:
        barrier.wait()
        acting.set()
        progress.finished.wait()
        sent.set()

    monkeypatch.setattr(agent_role, "process_was_asked_to_stop", lambda: True)
    monkeypatch.setattr(agent_role.logging, "shutdown", lambda: None)
    monkeypatch.setattr(agent_role.os, "_exit", leave)
    actor = threading.Thread(target=acts, daemon=True)
    actor.start()
    barrier.wait(120)  # the learner compiles from here on
    assert acting.wait(120)
    progress.stop()
    with pytest.raises(Left):
        agent_role._leave_if_unprepared(progress, barrier, actor)


class Ordered(CountingAgent):
    """Notes in which order it is made ready; training only when it may."""

    def __init__(self, may_compile: threading.Event) -> None:
        super().__init__()
        self.done: list[str] = []
        self._may_compile = may_compile

    def compile_policy(self, policy_batches: Sequence[int]) -> None:
        self.done.append("policy")

    def compile(self, *, policy_batches: Sequence[int] = (), **_: Any) -> None:
        assert self._may_compile.wait(120)
        self.done.append("all" if policy_batches else "training")


@pytest.mark.parametrize("servers", [""], indirect=True)
@pytest.mark.parametrize("again", [False, True], ids=["first start", "started again"])
def test_an_agent_that_is_started_again_acts_before_its_training_is_compiled(
    tmp_path: Path, servers: Servers, again: bool
) -> None:
    run, progress, barrier = small_run(tmp_path), Progress(), threading.Barrier(2)
    may_compile = threading.Event()
    made = Ordered(may_compile)
    if again:
        health_path(run, STARTED).parent.mkdir()
        health_path(run, STARTED).touch()
    else:
        may_compile.set()
    arguments = [made, barrier, run, progress]
    thread = threading.Thread(target=learner.parallel_learner, args=arguments, daemon=True)
    thread.start()
    barrier.wait(120)  # the actor acts from here on
    assert made.done == (["policy"] if again else ["all"])
    assert not (again and progress.prepared)
    may_compile.set()
    progress.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert made.done == (["policy", "training"] if again else ["all"])
    assert Checkpoint(tmp_path / "ckpt" / "agent").latest() is not None
