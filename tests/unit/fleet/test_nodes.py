"""Machines that join a run: which ids they get, what they are told, and what follows failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_parts import small_run, until_stopped

from dreamfleet import __version__
from dreamfleet.config import RunConfig
from dreamfleet.fleet.launchers import Worker, find_launcher
from dreamfleet.fleet.nodes import (
    LOST_SECONDS,
    Answer,
    JoinedNodes,
    Machine,
    MachineWorker,
    Refused,
    WorkerReport,
    addresses,
    metrics,
)
from dreamfleet.fleet.supervisor import FleetError, Supervisor
from dreamfleet.roles.fences import Fence, FenceReader, read_fences
from dreamfleet.roles.health import HealthRecord
from dreamfleet.transport import ArgumentError, Caller, Keys
from dreamfleet.transport.arguments import Parameters

FIRST = 4
"""The first id after those of the run's own environments."""
CALLER = Caller("env", "first", "127.0.0.1", b"1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class AtOnce:
    """A supervisor that starts what joins, and restarts nothing."""

    def __init__(self) -> None:
        self.nodes: list[Machine] = []

    def add(self, node: Machine, workers: Sequence[Worker]) -> None:
        self.nodes.append(node)
        for worker in workers:
            node.start(worker)

    def remove(self, node: Machine) -> None:
        self.nodes.remove(node)


def ids_of(answer: dict[str, Any]) -> list[int]:
    return [envid for each in answer["workers"].values() for envid in each["ids"]]


def poll(
    server: JoinedNodes,
    token: str = "one",
    report: Any = None,
    caller: Caller = CALLER,
    **asked: Any,
) -> dict[str, Any]:
    """What a machine is told, which joins with its first question."""
    sent = token, request(server, **asked), report or {}
    answer: dict[str, Any] = server.poll(caller, *Parameters("poll", server.poll, 1).take(sent))
    return answer


def described(server: JoinedNodes) -> dict[str, Any]:
    """What a machine is told that knows nothing of the run."""
    answer = poll(server, digest="")
    assert server.machines() == ()
    return answer


def names(server: JoinedNodes) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in server.machines()]


def test_ids_are_handed_out_given_back_and_used_again_with_another_incarnation(
    tmp_path: Path,
) -> None:
    server = nodes(tmp_path)
    one = poll(server, "one", envs=2)
    two = poll(server, "two", envs=3, eval_envs=1)
    assert ids_of(one) == [FIRST, FIRST + 1]
    assert ids_of(two) == [FIRST + 2, FIRST + 3, FIRST + 4, FIRST + 5]
    assert [each["is_eval"] for each in two["workers"].values()] == [False, False, True]
    assert poll(server, "one", envs=2) == one, "it has joined"
    assert names(server) == [("box", "joined"), ("box (2)", "joined")]
    server.leave(CALLER, "one")
    server.leave(CALLER, "one")
    assert names(server) == [("box (2)", "joined"), ("box", "left")]
    three = poll(server, "three", envs=3)
    assert ids_of(three) == [FIRST, FIRST + 1, FIRST + 6]
    numbers = [each["incarnation"] for answer in (one, two, three)
               for each in answer["workers"].values()]  # fmt: skip
    assert numbers == sorted(set(numbers)), "none is used twice"
    fences = {envid: each for each in read_fences(tmp_path).workers for envid in each.ids}
    assert fences[FIRST].incarnation == numbers[-2]
    assert fences[FIRST].invitation == "first"
    assert fences[FIRST + 5].is_eval


def test_a_machine_that_was_cut_off_keeps_its_ids_and_one_that_vanished_loses_them(
    tmp_path: Path,
) -> None:
    clock = Clock()
    server = nodes(tmp_path, clock=clock)
    before = poll(server, "cut", host="cut")
    gone = poll(server, "gone", host="gone")
    clock.now += LOST_SECONDS - 1
    assert names(server) == [("cut", "away"), ("gone", "away")]
    assert poll(server, "cut", host="cut") == before, "its processes go on"
    clock.now += 2
    assert names(server) == [("cut", "joined"), ("gone", "left")]
    assert [each.ids for each in read_fences(tmp_path).workers] == [(FIRST,)]
    assert ids_of(poll(server, "new")) == [FIRST + 1]
    back = poll(server, "gone", host="gone")
    assert ids_of(gone) == [FIRST + 1]
    assert ids_of(back) == [FIRST + 2], "it comes back as another one"


def test_steps_a_second_are_those_of_the_last_while(tmp_path: Path) -> None:
    clock = Clock()
    server = nodes(tmp_path, clock=clock)
    ((name, order),) = poll(server)["workers"].items()

    def report(steps: int) -> None:
        told = {"incarnation": order["incarnation"], "pid": 7, "health": {"steps": steps}}
        poll(server, report={"workers": {name: told}})

    for second in range(60):
        clock.now = 100.0 + second
        report(10 * second if second < 30 else 40 * second)
    assert server.machines()[0].steps_per_second == pytest.approx(40.0)
    assert metrics(server.machines())["machines/steps_per_second"] == pytest.approx(40.0)
    assert metrics(server.machines())["machines/environments"] == 1
    report(3)
    assert server.machines()[0].steps_per_second == 0


def test_nothing_of_a_run_before_acts_after_a_resume_and_no_incarnation_returns(
    tmp_path: Path,
) -> None:
    (order,) = poll(nodes(tmp_path), "secret", envs=2)["workers"].values()
    assert "secret" not in (tmp_path / "nodes.json").read_text()
    after = nodes(tmp_path)
    assert read_fences(tmp_path).workers == ()
    (again,) = poll(after, "secret", envs=2)["workers"].values()
    assert again["ids"] == order["ids"]
    assert again["incarnation"] > order["incarnation"]


def test_a_machine_that_knows_other_settings_does_not_join_with_them(tmp_path: Path) -> None:
    server = nodes(tmp_path)
    answer = poll(server, digest="of another run")
    assert (answer["name"], answer["workers"]) == ("", {})
    assert answer["digest"] == server._description["digest"]
    assert server.machines() == ()


def test_a_damaged_file_lets_nothing_old_act_and_no_incarnation_returns(tmp_path: Path) -> None:
    (order,) = poll(nodes(tmp_path))["workers"].values()
    (tmp_path / "nodes.json").write_text("{")
    assert FenceReader(tmp_path).of(FIRST) is None
    (again,) = poll(nodes(tmp_path))["workers"].values()
    assert again["incarnation"] > order["incarnation"]


def test_the_revoked_are_dropped(tmp_path: Path) -> None:
    server = nodes(tmp_path)
    poll(server)
    other = CALLER._replace(name="laptop")
    kept = poll(server, caller=other)
    server._invited.revoked = lambda: frozenset({"first"})  # type: ignore[method-assign]
    assert names(server) == [("box (2)", "joined"), ("box", "left")]
    assert poll(server, caller=other) == kept, "the same token of another invitation"
    assert "revoked" in server.machines()[-1].error
    assert {each.invitation for each in read_fences(tmp_path).workers} == {"laptop"}


def test_there_is_room_for_so_many_only(tmp_path: Path) -> None:
    run = bound(tmp_path).changed({"envs": 2})
    supervisor: Any = AtOnce()
    capacity = {"replay.capacity": 6 * run.window - 1}
    server = JoinedNodes(run.changed(capacity), "tcp://127.0.0.1:{auto}", supervisor)
    poll(server, "one", envs=2)
    with pytest.raises(Refused, match=r"2 have joined, .* have room for 1 more"):
        poll(server, "two", envs=2)
    poll(server, "two", envs=0, eval_envs=1)
    with pytest.raises(Refused, match="room for 0 more"):
        poll(server, "three", envs=1)


def test_a_run_with_rounds_of_evaluation_plays_them_itself(tmp_path: Path) -> None:
    server = nodes(tmp_path, eval_every=10)
    with pytest.raises(Refused, match=r"plays its evaluations itself \(eval_every\)"):
        poll(server, "one", envs=1, eval_envs=1)
    poll(server, "one", envs=1)


def test_a_worker_that_cannot_be_recorded_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nodes(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dreamfleet.fleet.nodes.write_fences", full)
    with pytest.raises(OSError, match="No space"):
        poll(server)
    assert poll(server)["workers"] == {}


def bound(logdir: Path, **changes: Any) -> RunConfig:
    logdir.mkdir(exist_ok=True)
    Keys.generate().save(logdir / "keys")
    settings = {"bind": "127.0.0.1", "actor_addr": "tcp://127.0.0.1:5551", **changes}
    return small_run(logdir, keys=str(logdir / "keys"), **settings)


def nodes(logdir: Path, clock: Callable[[], float] | None = None, **changes: Any) -> JoinedNodes:
    more = {"clock": clock} if clock else {}
    supervisor: Any = AtOnce()
    return JoinedNodes(bound(logdir, **changes), "tcp://127.0.0.1:{auto}", supervisor, **more)


def request(server: JoinedNodes, **changes: Any) -> dict[str, Any]:
    asked = {"version": __version__, "digest": server._description["digest"], "host": "box"}
    return {**asked, "envs": 1, "eval_envs": 0, "envs_per_process": 2, **changes}


def test_a_machine_is_told_what_the_run_is_and_nothing_private(tmp_path: Path) -> None:
    told = described(nodes(tmp_path / "secret-place", envs=3))
    config = RunConfig.from_json(told["config"])
    assert (config.task, config.env_options) == ("bundled:dummy", {"length": 25, "size": (8, 8)})
    assert "secret-place" not in json.dumps(told)
    assert told["addresses"] == {"actor": "tcp://*:5551"}


def test_settings_that_environments_do_not_read_stay_here(tmp_path: Path) -> None:
    private: dict[str, Any] = {
        "ray_runtime_env": {"env_vars": {"TOKEN": "secret"}},
        "ray_address": "ray://secret:10001",
        "outputs": ("secret.module:Output",),
    }
    told = described(nodes(tmp_path, **private))
    assert "secret" not in json.dumps(told)
    # A run that is resumed with another end is the same to a machine.
    longer = described(nodes(tmp_path, steps=12_345, duration=5.0))
    assert longer["digest"] == told["digest"]
    assert described(nodes(tmp_path, env_timeout=7.0))["digest"] != told["digest"]


def test_a_run_with_more_actors_than_environments_can_be_described(tmp_path: Path) -> None:
    told = described(nodes(tmp_path, envs=1, actors=3))
    assert RunConfig.from_json(told["config"]).actors == 3
    assert list(told["addresses"]) == ["actor", "actor-1", "actor-2"]


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    server = nodes(tmp_path)
    words = f"has Dreamfleet {__version__} and this machine 0.0.1: install {__version__}"
    with pytest.raises(Refused, match=words):
        poll(server, version="0.0.1")


def reported(**worker: Any) -> dict[str, Any]:
    return {"report": {"workers": {"env-0": worker}}}


BAD: list[dict[str, Any]] = [
    {"envs": -1},
    {"envs": 1.5},
    {"envs": 10**12},
    {"envs": 0},
    {"host": ""},
    {"digest": "x" * 10_000},
    {"version": 5},
    {"version": "x" * 10_000},
    {"envs_per_process": 0},
    {"envs_per_process": 3},
    {"more": 1},
    {"token": None},
    {"token": 5},
    {"token": "x" * 10_000},
    {"report": [1, 2]},
    {"report": {"workers": 5}},
    reported(),
    reported(incarnation=1, health={"steps": -1}),
    reported(incarnation=1, code=1 << 70),
    reported(incarnation=1, health={"doing": "nothing"}),
    reported(incarnation=1, output="x" * 10_000),
    reported(incarnation=1, health={"error": "x" * 2000}),
    {"report": {"why": "x" * 10_000}},
    {"report": {"other": 1}},
]


@pytest.mark.parametrize("wrong", BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_wrong_costs_the_sender_an_error(tmp_path: Path, wrong: dict[str, Any]) -> None:
    server = nodes(tmp_path)
    with pytest.raises((Refused, ArgumentError)):
        poll(server, **wrong)
    assert ids_of(poll(server)) == [FIRST]


def test_machines_hear_that_the_run_is_over(tmp_path: Path) -> None:
    server = nodes(tmp_path)
    assert poll(server)["over"] == ""
    server._over = "The run is over."
    assert poll(server)["over"] == "The run is over."
    assert all(each.state == "left" for each in server.machines())
    assert poll(server, "another one")["name"] == "", "it does not join any more"


class Supervised:
    """A run whose supervisor drives machines, and one machine of it that does what it is told."""

    def __init__(self, supervisor: Supervisor, server: JoinedNodes) -> None:
        self.supervisor, self.server = supervisor, server
        self.told: dict[str, dict[str, Any]] = {}
        self.last = self.poll()
        self.error: FleetError | None = None

    def poll(self) -> dict[str, Any]:
        report = {"workers": self.told}
        answer = poll(self.server, report=report, envs=2, envs_per_process=1)
        self.told = {
            name: {"incarnation": order["incarnation"], "pid": 7}
            for name, order in answer["workers"].items()
        }
        self.last = answer
        return answer

    def until(self, question: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        while not question(self.last):
            threading.Event().wait(0.01)
            self.poll()
        return self.last

    def fails(self, name: str, **more: Any) -> None:
        traceback = "Traceback (most recent call last):\nRuntimeError: the pole is broken"
        self.told[name] |= {"code": 1, "output": traceback, **more}
        self.poll()


@contextmanager
def supervised(logdir: Path, **changes: Any) -> Iterator[Supervised]:
    run = bound(logdir, **changes)
    with find_launcher("serial")(logdir) as launcher:
        leader = Worker("agent", "agent", until_stopped, ends_run=True)
        supervisor = Supervisor([leader], launcher)
        found: list[FleetError] = []

        def watch() -> None:
            try:
                supervisor.run()
            except FleetError as error:
                found.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        server = JoinedNodes(run, "tcp://127.0.0.1:{auto}", supervisor)
        machine = Supervised(supervisor, server)
        try:
            machine.until(lambda answer: len(answer["workers"]) == 2)
            yield machine
        finally:
            supervisor.stop()
            thread.join()
            machine.error = found[0] if found else None


def test_the_supervisor_restarts_the_workers_of_a_machine_with_another_incarnation(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path, on_failure="restart") as machine:
        before = machine.poll()["workers"]
        first, second = before
        machine.fails(first)
        after = machine.until(lambda answer: len(answer["workers"]) == 2)["workers"]
        assert after[first]["incarnation"] > before[first]["incarnation"]
        assert after[first]["ids"] == before[first]["ids"]
        assert after[second] == before[second], "the other one goes on"
    assert machine.error is None


def test_a_machine_that_fails_too_often_is_dismissed_and_the_run_goes_on(tmp_path: Path) -> None:
    """The failures of all its workers count together."""
    with supervised(tmp_path, on_failure="restart", max_restarts=1) as machine:
        first, second = machine.poll()["workers"]
        machine.fails(first)
        machine.until(lambda answer: len(answer["workers"]) == 2)
        machine.fails(second)
        answer = machine.until(lambda answer: answer["dismissed"])
        assert "the pole is broken" in answer["dismissed"]
        assert "after 1 restarts without progress" in answer["dismissed"]
        assert read_fences(tmp_path).workers == ()
        (gone,) = machine.server.machines()
        assert (gone.state, gone.error) == ("left", answer["dismissed"])
        assert machine.supervisor._state == "running"
    assert machine.error is None


def test_a_machine_cannot_end_a_run_that_goes_on_at_nan(tmp_path: Path) -> None:
    with supervised(tmp_path, on_failure="restart", on_nan="end") as machine:
        machine.fails(
            next(iter(machine.poll()["workers"])), health={"final": True, "not_finite": True}
        )
        machine.until(lambda answer: answer["dismissed"])
        assert machine.supervisor._state == "running"
    assert machine.error is None


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"on_failure": "stop"}, {}),
        (
            {"on_failure": "restart", "on_nan": "stop"},
            {"health": {"final": True, "not_finite": True}},
        ),
    ],
)
def test_a_failure_elsewhere_ends_a_run_that_stops_at_failures(
    tmp_path: Path, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    with supervised(tmp_path, **settings) as machine:
        machine.fails(next(iter(machine.poll()["workers"])), **more)
        answer = machine.until(lambda answer: answer["dismissed"])
        assert "the pole is broken" in answer["dismissed"], "the machine says why, too"
    assert machine.error is not None
    assert str(machine.error).startswith("The joined machine box failed: box/env-")
    assert "the pole is broken" in str(machine.error)


def test_addresses_are_those_that_machines_can_reach(tmp_path: Path) -> None:
    # By the host that reached the coordinator, unless the actor is elsewhere.
    run = bound(tmp_path, actor_addr="tcp://0.0.0.0:5551")
    assert addresses(run, "0.0.0.0") == {"actor": "tcp://*:5551"}
    run = bound(tmp_path, actor_addr="tcp://10.0.0.9:5551")
    assert addresses(run, "0.0.0.0") == {"actor": "tcp://10.0.0.9:5551"}
    assert addresses(run, "10.0.0.9") == {"actor": "tcp://*:5551"}


@pytest.mark.parametrize("name", ["/home/u/victim", "../../x", "env-1/../../x", "env-1\n", ""])
def test_a_run_does_not_choose_files_of_a_machine_that_joins(name: str) -> None:
    fence = {"ids": [0], "is_eval": False, "incarnation": 1, "invitation": "first"}
    answer = {"over": "", "digest": "", "addresses": {}}
    read = msgspec.convert({**answer, "workers": {"env-12": fence}}, Answer)
    assert set(read.workers) == {"env-12"}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**answer, "workers": {name: fence}}, Answer)


def test_what_a_machine_says_moves_no_cursor_of_the_runs_terminal() -> None:
    worker = MachineWorker("ann", Fence((8,), False, 1, "first"))
    worker.take(WorkerReport(1, health=HealthRecord(failures=1, error="\x1b]0;mine\x07\x1b[2Jx")))
    assert worker.health.error == "?]0;mine??[2Jx"
